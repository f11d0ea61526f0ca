"""Tests `lockstep data search-r1` on questions and documents in their published forms."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from typer.testing import CliRunner

from services.common.errors import InvalidInput, NotFound
from services.coordinator.cli.main import app

NQ = {"question": "who wrote it", "answer": ["A. Writer", "Ann Writer"]}
HOTPOT = {"question": "Was it first?", "answer": "yes", "type": "comparison"}
FLASH = {"id": "1", "question": "where?", "golden_answers": ["Oslo"]}
DOCUMENTS = [{"id": "0", "contents": '"It"\nIt was written.'}, {"title": "Oslo", "text": "A city."}, {"text": "Bare."}]


def lines(path: Path, rows: list[object]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def made(tmp_path: Path, questions: list[object], documents: list[object], *options: str) -> Exception | None:
    files = ["--questions", lines(tmp_path / "nq.jsonl", questions), "--corpus", lines(tmp_path / "c.jsonl", documents)]
    return CliRunner().invoke(app, ["data", "search-r1", *files, "--out", str(tmp_path / "out"), *options]).exception


def test_files_are_made(tmp_path):
    pq.write_table(pa.Table.from_pylist([HOTPOT]), tmp_path / "hotpot.parquet")
    assert made(tmp_path, [NQ, FLASH], DOCUMENTS, "--test-questions", str(tmp_path / "hotpot.parquet")) is None
    rows = pq.read_table(tmp_path / "out/train.parquet").to_pylist()
    assert [row["answers"] for row in rows] == [["A. Writer", "Ann Writer"], ["Oslo"]]
    assert [row["answer"] for row in rows] == ["A. Writer", "Oslo"]
    assert rows[0]["prompt"].endswith("\n\nQuestion: who wrote it") and rows[0]["source"] == "nq"
    assert all(f"<{tag}>" in rows[0]["prompt"] for tag in ("search", "information", "answer"))
    (test,) = pq.read_table(tmp_path / "out/test.parquet").to_pylist()
    assert test["answers"] == ["yes"]
    assert pq.read_table(tmp_path / "out/corpus.parquet").to_pylist() == [
        {"title": "It", "text": "It was written."},
        {"title": "Oslo", "text": "A city."},
        {"title": None, "text": "Bare."},
    ]


def test_bad_rows_fail_or_are_dropped(tmp_path):
    bad = [{"question": "who?"}, {"question": "who?", "answer": []}, {"question": "", "answer": "x"}, 7]
    error = made(tmp_path, [NQ, *bad], [*DOCUMENTS, {"title": "no text"}])
    assert isinstance(error, InvalidInput) and not (tmp_path / "out").exists()
    assert error.message.startswith(f"{tmp_path}/nq.jsonl, {tmp_path}/c.jsonl has 5 of 9 rows that are bad")
    assert made(tmp_path, [NQ, *bad], [*DOCUMENTS, {"title": "no text"}], "--bad-rows", "drop") is None
    assert pq.read_table(tmp_path / "out/train.parquet").num_rows == 1
    assert pq.read_table(tmp_path / "out/corpus.parquet").num_rows == 3


def test_what_is_missing_is_named(tmp_path):
    assert isinstance(made(tmp_path, [NQ], []), InvalidInput)
    error = made(tmp_path, [NQ], DOCUMENTS, "--test-questions", str(tmp_path / "none.jsonl"))
    assert isinstance(error, NotFound) and "none.jsonl" in error.message
