"""Tests the conversion of datasets, in the formats in which they are published, through the command line."""

import errno
import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from services.common.config.data import DataConfig
from services.common.config.load import load
from services.common.config.run import Config
from services.common.errors import InvalidInput, NotFound, PreconditionFailed
from services.coordinator.cli import groups
from services.coordinator.cli.main import app
from services.coordinator.data.formats import DEEPSCALER, GSM8K
from services.coordinator.data.prepare import ConversionOptions, ConversionReport, convert
from services.coordinator.data.prompts import PromptDataset
from services.coordinator.data.reading import parquet
from tests.coordinator.data.fake_hub import asking, hub
from tests.support import ROOT, raises

SOLUTION = "She sold 48/2 = <<48/2=24>>24 thousand.\nAltogether 48+24 = <<48+24=72>>72 thousand.\n#### 72,000"
GSM8K_ROWS = [{"question": "How many clips?", "answer": SOLUTION}] + [
    {"question": f" What is {n} - {2 * n}?\n", "answer": f"{n} - {2 * n} = {-n}\n#### {-n}"} for n in range(1, 8)
]
DEEPSCALER_ROWS = [
    {
        "problem": f"Find $x$ if $x + {n} = \\frac{{1}}{{2}}$.",
        "answer": f"$\\frac{{1}}{{2}} - {n}$",
        "solution": solution,
    }
    for n, solution in enumerate(["Subtract.", "", None, "Subtract.", "Subtract.", "Subtract."])
]


@pytest.fixture
def run():
    """Provides a function that runs `lockstep data ...` with the given arguments and raises its errors."""

    def invoke(*args: object) -> str:
        result = CliRunner().invoke(app, ["data", *map(str, args)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    return invoke


def write_gsm8k(folder: Path, form: str) -> Path:
    for split, rows in (("train", GSM8K_ROWS), ("test", GSM8K_ROWS[:2])):
        if form == "parquet":
            path = folder / "main" / f"{split}-00000-of-00001.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            folder.mkdir(exist_ok=True)
            lines = "\n".join(json.dumps(row) for row in rows)
            (folder / f"{split}.jsonl").write_text(lines + "\n\n", encoding="utf-8")
    return folder


def write_deepscaler(path: Path, rows: list) -> Path:
    if path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=2), encoding="utf-8")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_gsm8k(run, tmp_path, form):
    source = write_gsm8k(tmp_path / "gsm8k", form)
    # The socratic configuration is in the same repository as main, but is another dataset.
    (source / "socratic").mkdir()
    pq.write_table(
        pa.table({"question": ["no"], "answer": ["no"]}), source / "socratic" / "train-00000-of-00001.parquet"
    )
    output = run("gsm8k", "--source", source, "--out", tmp_path / "out")
    assert f"train       8 rows  {tmp_path}/out/train.parquet\n" in output
    assert f"test        2 rows  {tmp_path}/out/test.parquet\n" in output
    rows = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert len(rows) == 8
    assert rows[0] == {
        "prompt": f"How many clips?\n\n{GSM8K.instruction}",
        "answer": "72000",
        "source": "gsm8k",
        "solution": SOLUTION,
        "index": 0,
    }
    assert rows[1]["prompt"].startswith("What is 1 - 2?\n\n") and rows[1]["answer"] == "-1"
    assert [row["index"] for row in rows] == list(range(8))


@pytest.mark.parametrize("name", ["train.jsonl", "train.json", "train.parquet"])
def test_a_test_file_of_deepscaler_is_not_trained_on(run, tmp_path, name):
    (tmp_path / "in").mkdir()
    write_deepscaler(tmp_path / "in" / name, DEEPSCALER_ROWS[:3])
    write_deepscaler(tmp_path / "in" / "test.jsonl", DEEPSCALER_ROWS[3:5])
    run("deepscaler", "--source", tmp_path / "in", "--out", tmp_path)
    train, test = (pq.read_table(tmp_path / f"{split}.parquet")["prompt"].to_pylist() for split in ("train", "test"))
    assert (len(train), len(test)) == (3, 2) and not set(train) & set(test)


@pytest.mark.parametrize("name", ["deepscaler.json", "deepscaler.jsonl", "train-00000-of-00001.parquet"])
@pytest.mark.parametrize("whole_folder", [False, True])
def test_deepscaler(run, tmp_path, name, whole_folder):
    (tmp_path / "in").mkdir()
    path = write_deepscaler(tmp_path / "in" / name, DEEPSCALER_ROWS)
    output = run("deepscaler", "--source", path.parent if whole_folder else path, "--out", tmp_path, "--test-size", 2)
    assert "test        2 rows" in output and "held out of train" in output
    train, test = (pq.read_table(tmp_path / f"{split}.parquet").to_pylist() for split in ("train", "test"))
    assert len(train) == 4 and len(test) == 2
    both = sorted(train + test, key=lambda row: row["index"])
    assert both == [
        {
            "prompt": f"{row['problem']}\n\n{DEEPSCALER.instruction}",
            "answer": row["answer"],
            "source": "deepscaler",
            "solution": row["solution"] or "",
            "index": index,
        }
        for index, row in enumerate(DEEPSCALER_ROWS)
    ]


def test_a_converted_dataset_loads(run, tmp_path, tokenizer):
    run("gsm8k", "--source", write_gsm8k(tmp_path / "gsm8k", "jsonl"), "--out", tmp_path, "--instruction", "")
    config = DataConfig(train=(tmp_path / "train.parquet",), prompts_per_step=8, chat=True, shuffle=False)
    batch = PromptDataset.load(config, tokenizer, seed=0).batch(0)
    assert batch[0].text == tokenizer.render([{"role": "user", "content": "How many clips?"}])
    assert batch[0].extra == {"source": "gsm8k", "solution": SOLUTION, "index": 0}


def test_held_out_problems_are_not_in_train_whatever_the_order(tmp_path):
    rows = [row | {"answer": str(n)} for n in range(3) for row in DEEPSCALER_ROWS * 2]
    splits = []
    for name, ordered in (("a.json", rows), ("b.json", rows[::-1])):
        report = convert(
            DEEPSCALER, str(write_deepscaler(tmp_path / name, ordered)), tmp_path, ConversionOptions(test_size=2)
        )
        assert report.num_held_out == report.num_rows["test"] == 2 * 6
        train, test = (set(pq.read_table(report.files[split])["prompt"].to_pylist()) for split in ("train", "test"))
        assert len(train) == 4 and len(test) == 2 and not train & test
        splits.append(test)
    assert splits[0] == splits[1]


def test_same_bytes_every_time(tmp_path):
    source = str(write_deepscaler(tmp_path / "x.json", DEEPSCALER_ROWS))
    reports = [convert(DEEPSCALER, source, tmp_path / out, ConversionOptions(test_size=2)) for out in "ab"]
    for split in ("train", "test"):
        assert reports[0].files[split].read_bytes() == reports[1].files[split].read_bytes()


def test_no_test_split(tmp_path):
    source = str(write_deepscaler(tmp_path / "x.json", DEEPSCALER_ROWS))
    report = convert(DEEPSCALER, source, tmp_path / "out", ConversionOptions(test_size=0))
    assert dict(report.num_rows) == {"train": 6}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train.parquet"]
    with raises(InvalidInput, field="test_size"):
        convert(DEEPSCALER, source, tmp_path, ConversionOptions(test_size=6))
    convert(DEEPSCALER, source, tmp_path / "both", ConversionOptions(test_size=2))
    with raises(InvalidInput, field="out"):  # the old test set may have rows of the new training set
        convert(DEEPSCALER, source, tmp_path / "both", ConversionOptions(test_size=0))


def test_bad_rows(run, tmp_path):
    good = json.dumps(GSM8K_ROWS[0])
    lines = [
        good,
        '{"question": "cut',
        json.dumps({"question": "x", "answer": "no mark"}),
        json.dumps({"question": "x", "answer": "#### "}),
        json.dumps({"question": None, "answer": "#### 1"}),
        json.dumps({"problem": "x", "answer": "#### 1"}),
        json.dumps(["x"]),
        json.dumps({"question": "x", "answer": 3}),
        json.dumps({"question": " ", "answer": "#### 1"}),
    ]
    source = tmp_path / "train.jsonl"
    source.write_text("\n".join(lines))
    options = ("--source", source, "--out", tmp_path / "out", "--test-size", 0)
    with pytest.raises(InvalidInput) as caught:
        run("gsm8k", *options)
    message = caught.value.message
    assert message.startswith(f"{source} has 8 of 9 rows that are bad: {source} line 2: Unterminated")
    assert f"{source} line 3: answer does not end with #### and the result" in message
    assert f"{source} line 5: question is null, not text" in message
    assert message.endswith("; and 3 more (counted from 1). Fix them, or drop them with --bad-rows drop")
    assert not (tmp_path / "out").exists()

    output = run("gsm8k", *options, "--bad-rows", "drop")
    assert "train       1 rows" in output and "dropped 8 bad rows:" in output
    report = convert(GSM8K, str(source), tmp_path, ConversionOptions(bad_rows="drop", test_size=0))
    reasons = [line.removeprefix(f"{source} ") for line in report.dropped]
    assert {"line 6: no column question, only problem, answer", "line 7 is a list, not an object"} <= set(reasons)
    assert {"line 8: answer is a number, not text", "line 9: question is empty"} <= set(reasons)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.json", "[1, 2", "is not JSON"),
        ("x.json", "[" * 100_000, "is not JSON"),
        ("x.csv", "question,answer", "is empty"),
        ("x.txt", "question,answer", r"its name must end in \.parquet"),
        ("x.parquet", "no", "is not a readable Parquet file"),
        ("x.jsonl", "", "has no rows for train"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(InvalidInput, match=message):
        convert(GSM8K, str(tmp_path / name), tmp_path / "out", ConversionOptions(test_size=0))
    assert not (tmp_path / "out").exists()


WRITTEN = '{"question": "Café?", "answer": "#### 2"}'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.jsonl", WRITTEN.encode("utf-16")),
        ("x.json", f"[{WRITTEN}, 7]".encode("utf-16")),
        ("x.jsonl.gz", gzip.compress(WRITTEN.encode("utf-8-sig"))),
        ("x.csv", "question,answer\nCafé?,#### 2".encode()),
        ("x.jsonl", f"{WRITTEN}\n".encode() + WRITTEN.encode("latin-1")),
        ("x.jsonl", f'{WRITTEN}\r{{"question": {"9" * 5000}}}'.encode()),
        ("x.jsonl", (WRITTEN + '\n{"question": "\\ud83d", "answer": "#### 1"}').encode()),
        ("x.jsonl", f"{WRITTEN}\n{'[' * 100_000}".encode()),
    ],
)
def test_files_that_a_run_reads_are_read_and_bad_rows_dropped(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    options = ConversionOptions(bad_rows="drop", test_size=0, instruction="")
    report = convert(GSM8K, str(tmp_path / name), tmp_path / "out", options)
    assert pq.read_table(report.files["train"])["prompt"].to_pylist() == ["Café?"]


def test_missing_sources(tmp_path):
    with raises(NotFound, field="source"):
        convert(GSM8K, str(tmp_path / "none" / "x" / "y"), tmp_path, ConversionOptions())
    (tmp_path / "readme.md").touch()
    with pytest.raises(NotFound, match=r"has no file main/train-\*\.parquet or .* for gsm8k; it holds readme\.md"):
        convert(GSM8K, str(tmp_path), tmp_path, ConversionOptions())


def test_a_failed_write_leaves_the_old_files(tmp_path):
    """If the second file cannot be written, the first is not replaced either and no temporary file remains."""
    old = pa.table({"prompt": ["old"]})
    parquet.write_tables({tmp_path / "train.parquet": old, tmp_path / "test.parquet": old})
    (tmp_path / "blocked").touch()
    with pytest.raises(PreconditionFailed, match="blocked cannot be written"):
        parquet.write_tables(
            {tmp_path / "train.parquet": pa.table({"prompt": ["new"]}), tmp_path / "blocked" / "x": old}
        )
    assert pq.read_table(tmp_path / "train.parquet") == old
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blocked", "test.parquet", "train.parquet"]


def test_files_are_on_disk_before_one_is_replaced(tmp_path, monkeypatch):
    old, paths = pa.table({"prompt": ["old"]}), [tmp_path / name for name in ("train.parquet", "test.parquet")]
    parquet.write_tables(dict.fromkeys(paths, old))

    def full(descriptor: int) -> None:
        if "train" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PreconditionFailed, match=r"train\.parquet cannot be written"):
        parquet.write_tables(dict.fromkeys(paths, pa.table({"prompt": ["new"]})))
    assert [pq.read_table(path) for path in paths] == [old, old]


def test_arithmetic(run, tmp_path):
    for out in "ab":
        output = run("arithmetic", "--out", tmp_path / out, "--num-train", 200, "--num-test", 20, "--seed", 5)
    assert "train     200 rows" in output
    rows = {split: pq.read_table(tmp_path / "a" / f"{split}.parquet").to_pylist() for split in ("train", "test")}
    assert [len(rows["train"]), len(rows["test"])] == [200, 20]
    assert not {row["prompt"] for row in rows["train"]} & {row["prompt"] for row in rows["test"]}
    assert (tmp_path / "a" / "train.parquet").read_bytes() == (tmp_path / "b" / "train.parquet").read_bytes()
    run("arithmetic", "--out", tmp_path / "b", "--num-train", 200, "--num-test", 20, "--seed", 6)
    assert (tmp_path / "a" / "train.parquet").read_bytes() != (tmp_path / "b" / "train.parquet").read_bytes()


def test_arithmetic_is_written_where_the_examples_read_it(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("arithmetic", "--num-train", 20, "--num-test", 2)
    config = load(Config, [str(ROOT / "deploy" / "runs" / "tries.yaml")])
    assert all(path.is_file() for path in (*config.data.train, *config.data.eval.values()))


CONVERTING = """
from pathlib import Path
from services.common.errors import LockstepError
from services.coordinator.data.prepare import ConversionOptions, convert
from services.coordinator.data.formats import GSM8K
def answer(source):
    try:
        return str(dict(convert(GSM8K, source, Path("out"), ConversionOptions()).num_rows))
    except LockstepError as error:
        return f"{type(error).__name__} {error}"
"""


def test_from_the_hub(tmp_path):
    folder = write_gsm8k(tmp_path / "published", "parquet")
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.parquet")}
    files |= {"socratic/train-00000-of-00001.parquet": b"", "README.md": b"x"}
    with hub(files) as endpoint, asking(CONVERTING, endpoint, tmp_path) as ask:
        assert ask("openai/gsm8k") == "{'train': 8, 'test': 2}"
        downloaded = {path.name for path in (tmp_path / "hf").rglob("*") if path.is_symlink()}
        assert downloaded == {"train-00000-of-00001.parquet", "test-00000-of-00001.parquet"}
        missing = ask("openai/gsm9k")
    assert missing.startswith("NotFound source: you cannot see dataset openai/gsm9k, which is no path here, on the")
    with asking(CONVERTING, endpoint, tmp_path) as ask:
        elsewhere = ask("openai/gsm9k")
    assert elsewhere.startswith("Unavailable source: dataset openai/gsm9k, which is no path here, was not downloaded")
    assert elsewhere.endswith("): use a local copy") and "\n" not in elsewhere


def test_a_large_number_of_rows_is_apart_from_its_name(capsys, tmp_path):
    groups._show_report(ConversionReport("search-r1", "here", {"corpus": tmp_path}, {"corpus": 21_015_324}))
    assert f"  corpus 21015324 rows  {tmp_path}\n" in capsys.readouterr().out
