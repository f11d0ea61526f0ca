"""Files of rows: JSON Lines gives the rows that Parquet gives, and what cannot be read is named by line."""

import errno
import gzip
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.common.config.data import DataConfig
from services.common.errors import InvalidInput, LockstepError, NotFound
from services.coordinator.data.prompts import PromptDataset
from services.coordinator.data.reading.record import BadRows
from services.coordinator.data.reading.sources import read_rows, read_usable
from services.coordinator.text.tokenizer import Tokenizer
from tests.coordinator.data.fake_hub import asking, hub
from tests.support import raises

ROWS: list[dict[str, Any]] = [
    {"prompt": "1 + 1 =", "answer": "2", "level": 1, "date": "2024-01-01"},
    {"prompt": "2 + 2 =", "answer": "4", "tags": ["a", "b"], "meta": {"k": 0.5}},
    {"prompt": "ü\n?", "answer": "2024-01-01", "level": None, "meta": {"n": None}},
]
MESSAGES = [{"role": "user", "content": "What is 1 + 1?"}]


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n\n" for row in rows), encoding="utf-8")
    return path


def load(path: Path, tokenizer: Tokenizer, **keys: Any) -> PromptDataset:
    config = DataConfig.model_validate({"train": path, "prompts_per_step": 1} | keys)
    return PromptDataset.load(config, tokenizer, seed=0)


@pytest.mark.parametrize("name", ["train.jsonl", "train.ndjson"])
def test_lines_are_read_like_parquet(tokenizer: Tokenizer, tmp_path: Path, name: str) -> None:
    rows = [{"level": None, "tags": ["a"], "meta": {"k": 0.5, "n": [1]}} | row for row in ROWS[:2]]
    rows = [{key: row.get(key) for key in ("prompt", "answer", "level", "tags", "date")} for row in rows]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    lines = load(write_lines(tmp_path / name, rows), tokenizer)
    assert lines.digest == load(tmp_path / "train.parquet", tokenizer).digest
    assert lines.prompts[1].extra == {"level": None, "tags": ["a", "b"], "date": None}


def test_a_line_has_its_own_keys(tokenizer: Tokenizer, tmp_path: Path) -> None:
    lines = load(write_lines(tmp_path / "train.jsonl", ROWS), tokenizer)
    assert [prompt.answer for prompt in lines.prompts] == ["2", "4", "2024-01-01"]  # text, not a date
    assert [prompt.extra for prompt in lines.prompts] == [
        {"level": 1, "date": "2024-01-01"},
        {"tags": ["a", "b"], "meta": {"k": 0.5}},
        {"level": None, "meta": {"n": None}},
    ]


def test_structs_of_parquet_have_no_null_fields(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tests = [{"inputs": ["1"], "fn_name": None, "more": [{"a": None, "b": 1}, None]}, {"inputs": [], "fn_name": "f"}]
    rows = [{"prompt": "a", "answer": "1", "tests": test, "level": None} for test in tests]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    first, second = load(tmp_path / "train.parquet", tokenizer).prompts
    assert first.extra == {"tests": {"inputs": ["1"], "more": [{"b": 1}, None]}, "level": None}
    assert second.extra == {"tests": {"inputs": [], "fn_name": "f"}, "level": None}


def test_lines_of_messages(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "chat.jsonl", [{"prompt": MESSAGES, "answer": "2"}])
    config = DataConfig(train=(path,), prompts_per_step=1)
    (prompt,) = PromptDataset.load(config, tokenizer, seed=0).prompts
    assert prompt.messages == tuple(MESSAGES)


def rows_of(path: Path, **keys: Any) -> list[dict[str, Any]]:
    return [dict(row) for _, row in read_rows(path, field="data.train", **keys)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1}\n{"a": \n', r"data\.train: .*x\.jsonl is not JSON Lines: .*x\.jsonl line 2: Expecting value"),
        ('{"a": 1}\n[1]\n', r"line 2 is a list, not an object"),
        ("", r"data\.train: .*x\.jsonl is empty$"),
        ("\n \n", r"x\.jsonl is empty$"),
        ('{"a": ' + "[" * 100_000 + "\n", r"x\.jsonl line 1 nests more than 500 levels deep"),
        ('{"a": 1}\n\n{"a": "caf\udce9"}\n', r"x\.jsonl line 3 has the byte 0xe9: save the file as UTF-8"),
    ],
)
def test_lines_that_cannot_be_used_are_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "x.jsonl").write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(InvalidInput, match=message):
        read_rows(tmp_path / "x.jsonl", field="data.train")


def test_a_bad_row_is_named_by_its_line(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": ""}])
    with pytest.raises(InvalidInput, match=r"x\.jsonl line 3: the answer is empty"):  # line 2 is blank
        PromptDataset.load(DataConfig(train=(path,), prompts_per_step=1), tokenizer, seed=0)


@pytest.mark.parametrize("name", ["x.json", "x.txt", "x"])
def test_parquet_is_known_by_its_content(tmp_path: Path, name: str) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / name)
    assert rows_of(tmp_path / name) == [{"a": 1}]


def test_a_file_that_is_missing_or_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(NotFound, field="data.train"):
        read_rows(tmp_path / "none.jsonl", field="data.train")
    (tmp_path / "mine.jsonl").write_text("{}\n")
    denied = PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "mine.jsonl"))
    monkeypatch.setattr(Path, "open", Mock(side_effect=denied))
    with pytest.raises(InvalidInput, match=r"data.train: .*mine.jsonl cannot be read: Permission denied"):
        read_rows(tmp_path / "mine.jsonl", field="data.train")


@pytest.mark.parametrize(
    ("make", "problem"),
    [(os.mkfifo, "is not a regular file"), (lambda path: path.symlink_to(path.name), "cannot be read|does not exist")],
)
@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_a_pipe_or_a_link_to_itself_is_named(
    tokenizer: Tokenizer, tmp_path: Path, make: Callable[[Path], Any], problem: str, name: str
) -> None:
    make(tmp_path / name)
    with pytest.raises(LockstepError, match=rf"data\.train: .*{name} ({problem})"):
        load(tmp_path / name, tokenizer)
    with pytest.raises(LockstepError, match=rf"source: .*{name} ({problem})"):
        list(read_usable(tmp_path / name, BadRows("", "", ""), field="source"))


def test_a_line_or_a_list_that_unpacks_to_more_than_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reads rows one by one keeps none of them, so lines together may be more than the memory."""
    of = "services.coordinator.data.reading.sources"
    monkeypatch.setattr(f"{of}._MOST_OF_LINE", 1 << 16)
    monkeypatch.setattr(f"{of}.usable_memory", lambda: (8.0, 2**-12))
    lines, line, rows = tmp_path / "lines.jsonl.gz", tmp_path / "line.jsonl.gz", tmp_path / "list.json.gz"
    lines.write_bytes(gzip.compress(b'{"a": 1}\n' * (1 << 16)))
    line.write_bytes(gzip.compress(b'{"a": 1}\n\n{"a": "' + bytes(1 << 16)))
    rows.write_bytes(gzip.compress(b"[" + b" " * (2 << 20) + b"]"))
    bad = BadRows("", "", "")
    assert sum(1 for _ in read_usable(lines, bad, field="source")) == 1 << 16 and not bad.rows
    for path, problem in (line, "is not JSON: it has a line of more than 65,536 bytes"), (rows, "it unpacks to over"):
        with pytest.raises(InvalidInput, match=rf"source: {path} .*{problem}"):
            list(read_usable(path, bad, field="source"))


def test_text_of_parquet_that_is_not_utf8_is_a_bad_row(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """pyarrow reads the bytes of a column of text without a look at them."""
    ends = pa.array([0, 1, 2], pa.int32()).buffers()[1]
    texts = pa.Array.from_buffers(pa.string(), 2, [None, ends, pa.py_buffer(b"a\xff")])
    for name in ("prompt", "answer", "x"):
        table = pa.table({"prompt": ["a", "b"], "answer": ["1", "2"], "x": ["", ""]} | {name: texts})
        pq.write_table(table, tmp_path / "x.parquet")
        with pytest.raises(InvalidInput, match=r"1 of 2 rows .* row 2: .*text that is not UTF-8"):
            load(tmp_path / "x.parquet", tokenizer)


def test_a_row_of_thousands_of_columns_is_read_within_seconds(tmp_path: Path) -> None:
    """The names of all columns were listed for each of them, which took four times as long for twice as many."""
    names = [f"c{index}" for index in range(8000)]
    pq.write_table(pa.table({name: [1] for name in names}), tmp_path / "x.parquet")
    begin = time.process_time()
    assert rows_of(tmp_path / "x.parquet") == [dict.fromkeys(names, 1)]
    assert time.process_time() - begin < 4


READING = """
from pathlib import Path
from services.common.errors import LockstepError
from services.coordinator.data.reading.sources import files_of, read_rows
def answer(url):
    try:
        files = files_of(Path(url), field="data.train")
        return str([dict(row) for file in files for _, row in read_rows(file, field="data.train")])
    except LockstepError as error:
        return f"{type(error).__name__} {error}"
"""
DATASET = "hf://datasets/openai/gsm8k"


def test_files_on_the_hub(tmp_path: Path) -> None:
    rows = "[{'a': 1}]"
    with hub({"data/train.jsonl": b'{"a": 1}\n'}) as endpoint, asking(READING, endpoint, tmp_path) as ask:
        assert ask(f"{DATASET}/data/train.jsonl") == rows
        assert ask(f"{DATASET}@v1/data/train.jsonl") == rows
        missing = ask("hf://datasets/openai/gsm9k/data/train.jsonl")
        assert missing.startswith("NotFound data.train: you cannot see file data/train.jsonl of dataset openai/gsm9k")
    with asking(READING, endpoint, tmp_path) as ask:
        assert ask(f"{DATASET}/data/train.jsonl") == rows  # it was kept
        elsewhere = ask(f"{DATASET}/other.jsonl")
    assert elsewhere.startswith("Unavailable data.train: file other.jsonl of dataset openai/gsm8k was not downloaded")


def test_several_files_of_a_dataset_on_the_hub(tmp_path: Path) -> None:
    lines = {f"data/train-{part}.jsonl": f'{{"a": {part}}}\n'.encode() for part in (2, 1)}
    files = lines | {"data/test.jsonl": b'{"a": 0}\n', "README.md": b"train.jsonl"}
    with hub(files) as endpoint, asking(READING, endpoint, tmp_path) as ask:
        for url in (DATASET, f"{DATASET}@v1", f"{DATASET}/data/train-*.jsonl"):
            assert ask(url) == "[{'a': 1}, {'a': 2}]"
        unclear = ask(f"{DATASET}/*.parquet")
        assert unclear.startswith(
            f"InvalidInput data.train: {DATASET.replace('//', '/')}/*.parquet does not say which files"
        )
        assert unclear.endswith("it has data/test.jsonl, data/train-1.jsonl, data/train-2.jsonl")
        files.clear()
        files.update({"easy/train.jsonl": b"", "hard/train.jsonl": b""})
        assert "easy/train.jsonl, hard/train.jsonl" in ask(DATASET)
        files.clear()
        files.update({"train.json": b'[{"a": 1}]', "train.csv": b"a\n2\n", "dataset_infos.json": b"{}"})
        assert ask(f"{DATASET}/train.csv") == "[{'a': '2'}]"
        assert ask(DATASET) == "[{'a': 1}]"
        files.clear()
        files["README.md"] = b""
        assert "it has no .parquet or .jsonl or .ndjson" in ask(DATASET)
    with asking(READING, endpoint, tmp_path) as ask:
        unreachable = ask(DATASET)
    assert unreachable.startswith("Unavailable data.train: the files of dataset openai/gsm8k are not known")
    assert "\n" not in unreachable


def test_other_urls_are_refused() -> None:
    with raises(InvalidInput, field="data.train"):
        read_rows(Path("hf://openai/gsm8k"), field="data.train")


LINES = '{"a": "é"}\n{"a": "2"}\n'
LIST = '[{"a": "é"},\n {"a": "2"}]'
CSV = 'a\r\né\r\n"2"\r\n'


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("is_compressed", [False, True])
@pytest.mark.parametrize(
    ("name", "text"),
    [("x.jsonl", LINES), ("x.ndjson", LINES), ("x.json", LINES), ("x.json", LIST), ("x.csv", CSV), ("x.JSONL", LINES)],
)
def test_forms_of_text(tmp_path: Path, name: str, text: str, encoding: str, is_compressed: bool) -> None:
    content = text.encode(encoding)
    path = tmp_path / (f"{name}.gz" if is_compressed else name)
    path.write_bytes(gzip.compress(content) if is_compressed else content)
    assert rows_of(path) == [{"a": "é"}, {"a": "2"}]
    assert rows_of(path, max_rows=1) == [{"a": "é"}]


def test_all_columns_of_csv_are_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(
        'prompt,answer,level,note\n"1 + 1,\n= ""?""",2,1,\n\n"' + "x" * 200_000 + '",4,2,null\n'
    )
    first, second = load(tmp_path / "x.csv", tokenizer, max_prompt_tokens=10**6).prompts
    assert (first.text, first.answer, first.extra) == ('1 + 1,\n= "?"', "2", {"level": "1", "note": ""})
    assert (second.answer, second.extra) == ("4", {"level": "2", "note": "null"})
    (tmp_path / "x.csv").write_text('prompt,answer\n"a\nb",1\n\nc,\n')
    with pytest.raises(InvalidInput, match=r"x\.csv line 5: the answer is empty"):
        load(tmp_path / "x.csv", tokenizer)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "x.json",
            b'{"a": 1}\n{"a"\n',
            r"is not a JSON list of objects, or one object a line: .*json line 2: Expecting",
        ),
        ("x.json", b'[{"a": 1}, 2]', r"x\.json row 2 is a number, not an object"),
        ("x.json", b'[{"a": 1},\n{"a": }]', r"Expecting value: line 2 column 7"),
        ("x.json", b'[{"a":\n"caf\xe9"}]', r"x\.json line 2 has the byte 0xe9: save the file as UTF-8"),
        ("x.json", b"[]", r"x\.json is empty"),
        ("x.csv", b"a,b\n1,2\n1\n", r"is not CSV: .*x\.csv line 3 has 1 cells, the first line 2"),
        ("x.csv", b"a;b\n1,5;2\n", r"is not CSV: its first line has ';' between columns: write commas instead"),
        ("x.csv", b"a,b,a\n1,2,3\n", r"is not CSV: its first line names a twice"),
        ("x.csv", b'a\n1\n"2\n', r"is not CSV: .*x\.csv line 3: unexpected end of data"),
        ("x.csv", b"a\ncaf\xe9\n", r"x\.csv line 2 has the byte 0xe9: save the file as UTF-8"),
        ("x.csv", b"a\n", r"x\.csv is empty"),
        ("x.jsonl.gz", gzip.compress(b'{"a": 1}\n')[:-9], r"x\.jsonl\.gz cannot be read: Compressed file ended"),
        (
            "x.txt",
            b'{"a": 1}',
            r"x\.txt is of no known form: its name must end in \.parquet, \.jsonl, \.ndjson, \.json, \.csv",
        ),
    ],
)
def test_files_that_cannot_be_used_say_why(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidInput, match=rf"data\.train: .*{message}"):
        read_rows(tmp_path / name, field="data.train")


def test_a_gzip_file_that_unpacks_to_more_than_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n' + b"\n" * (64 << 20)))
    assert rows_of(path) == [{"a": 1}]
    monkeypatch.setattr("services.coordinator.data.reading.sources.usable_memory", lambda: (8.0, 0.18))
    with pytest.raises(InvalidInput, match=r"x\.jsonl\.gz cannot be read: it unpacks to over 0\.1 GiB, a third"):
        read_rows(path, field="data.train")


def test_a_text_that_no_model_reads_is_not_tokenized(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [{"prompt": "1", "answer": "1"}, {"prompt": "1" * 2**25, "answer": "1"}])
    with pytest.raises(InvalidInput, match=r"x\.jsonl line 3: its text has 33,554,432 characters, more than"):
        load(path, tokenizer)
    assert len(load(path, tokenizer, bad_rows="drop").prompts) == 1


def test_patterns_on_this_host(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for part in ("2", "1"):
        write_lines(tmp_path / f"part-{part}.jsonl", [{"prompt": part, "answer": part}])
    write_lines(tmp_path / "part-[1].jsonl", [{"prompt": "3", "answer": "3"}])
    (tmp_path / "part-0.jsonl").mkdir()
    both = load(tmp_path / "part-?.jsonl", tokenizer)
    assert [prompt.answer for prompt in both.prompts] == ["1", "2"]
    assert [prompt.answer for prompt in load(tmp_path / "part-[1].jsonl", tokenizer).prompts] == ["3"]  # a name
    with raises(NotFound, field="data.train"):
        load(tmp_path / "x*.jsonl", tokenizer)


def test_a_file_that_is_used_twice_is_named(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_lines(tmp_path / "x.jsonl", [{"prompt": "a", "answer": "1"}])
    (tmp_path / "link.jsonl").symlink_to(path)
    other = write_lines(tmp_path / "y.jsonl", [{"prompt": "b", "answer": "1"}])
    load(path, tokenizer, eval={"y": str(other)})
    assert caplog.messages == []
    load(path, tokenizer, train=[str(path), str(tmp_path / "*.jsonl")], eval={"y": str(other)})
    assert [message for message in caplog.messages if "times" in message] == [
        f"data.train has {path} 3 times: its rows count as often"
    ]
    shared = f"data.eval.y is {other}, which data.train has too: the run is evaluated on what it is trained on"
    assert shared in caplog.messages


def test_other_forms_of_a_data_set_are_refused_with_the_way_to_read_them(tmp_path: Path) -> None:
    with pytest.raises(
        NotFound, match=r"data\.train: openai/gsm8k does not exist; if .* write hf://datasets/openai/gsm8k"
    ):
        read_rows(Path("openai/gsm8k"), field="data.train")
    with pytest.raises(NotFound, match=r"train does not exist$"):
        read_rows(tmp_path / "train", field="data.train")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "data-00000-of-00001.arrow").write_bytes(b"ARROW1")
    for path in (tmp_path / "saved", tmp_path / "saved" / "data-00000-of-00001.arrow"):
        with pytest.raises(InvalidInput, match=r"Dataset\.to_parquet"):
            read_rows(path, field="data.train")
