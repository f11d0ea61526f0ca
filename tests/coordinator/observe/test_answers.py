"""Tests that a report shows the answers of the rows beside the samples, as plain text."""

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.coordinator.observe.report.page import gather, render, write_report
from tests.coordinator.observe.test_report import CHROMIUM, HOSTILE, Tags, drawn, run_dir

__all__ = ["run_dir"]


@pytest.fixture
def answers_dir(run_dir: Path, tmp_path: Path) -> Path:
    """Returns a copy of the run whose samples have answers; those of the last group are no text."""
    copy = Path(shutil.copytree(run_dir, tmp_path / "run"))
    for path in (*(copy / "batches").glob("*.parquet"), *(copy / "evaluations").glob("*.parquet")):
        table = pq.read_table(path)
        answers = [None if group == 7 else f"answer {group} {HOSTILE[1]}" for group in table["group"].to_pylist()]
        pq.write_table(table.append_column("answer", pa.array(answers, pa.string())), path)
    return copy


def test_the_answers_of_the_rows_are_shown_as_text(answers_dir: Path) -> None:
    data = gather(answers_dir)
    for source in data["samples"]:
        for group, (_, _, answer) in source["prompts"].items():
            assert answer == (None if group == 7 else f"answer {group} {HOSTILE[1]}"), source["label"]
    page = Tags(render(data))
    assert "<" not in page.scripts[0] and not {"img", "b"} & set(page.tags)
    path = answers_dir / "batches" / "step-000000.parquet"
    samples = pq.read_table(path).drop_columns("answer")
    pq.write_table(samples.append_column("answer", pa.array([b"\xff"] * samples.num_rows)), path)
    assert gather(answers_dir)["samples"][0]["prompts"][0][2] is None


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_draws_the_answers(answers_dir: Path, tmp_path: Path) -> None:
    done = drawn(write_report(answers_dir, tmp_path / "report.html"), tmp_path)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    table = done.stdout.partition('<table id="rows">')[2].partition("</table>")[0]
    assert "<th>answer</th>" in table and table.count('<td class="text answer">') == 25
    assert table.count("answer 0 ") == 4


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_gives_long_answers_a_wider_column(answers_dir: Path, tmp_path: Path) -> None:
    path = answers_dir / "batches" / "step-000002.parquet"
    table = pq.read_table(path).drop_columns("answer")
    answers = ["4"] * (table.num_rows - 1) + ["x" * 2000]
    pq.write_table(table.append_column("answer", pa.array(answers)), path)
    done = drawn(write_report(answers_dir, tmp_path / "report.html"), tmp_path)
    table = done.stdout.partition('<table id="rows">')[2].partition("</table>")[0]
    assert table.count('<td class="text long answer">') == 25 and "<th>answer</th>" in table
