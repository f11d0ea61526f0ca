"""Converts published datasets to the prompt files that a run reads: `train.parquet` and `test.parquet`.

For episodes with a search, as Search-R1 (arXiv 2503.09516) has them, there is a corpus too. Their questions are as NQ,
HotpotQA and others publish them, {"question", "answer" or "answers" or "golden_answers"}, with one answer or a list.
Documents are {"text", "title"}, or {"contents"} with the title in the first line.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

import huggingface_hub
import pyarrow as pa
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

from services.common.errors import InvalidInput, NotFound, Unavailable
from services.coordinator.data.prepare.formats import ConversionOptions, Example, Format, Split, text
from services.coordinator.data.reading.parquet import Record, iter_rows, read_table, row_place, write_tables
from services.coordinator.data.reading.record import BadRow, BadRows

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FIELD = "source"


def find_files(format: Format, source: str, revision: str | None = None) -> dict[Split, list[Path]]:
    """Returns the files of each split. `source` is a file (all train), a directory, or the id of a dataset on the Hub.

    Raises:
        NotFound: There is no such path or dataset, or it has none of the files of `format`.
        Unavailable: The Hub is unreachable.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return {"train": [path]}
    folder = path if path.is_dir() else _download(format, source, revision)
    found: dict[Split, list[Path]] = {split: _first_match(folder, patterns) for split, patterns in format.files.items()}
    if not found["train"]:
        inside = ", ".join(sorted(str(file.relative_to(folder)) for file in folder.rglob("*.*"))[:10]) or "nothing"
        wanted = " or ".join(format.files["train"])
        raise NotFound(f"{source} has no file {wanted} for {format.name}; it holds {inside}", field=_FIELD)
    return {split: files for split, files in found.items() if files}


def read_records(path: Path, bad: BadRows) -> Iterator[tuple[str, int, Record]]:
    """Yields place, index and content of each record of a Parquet, JSON or JSON Lines file. Adds bad lines to `bad`.

    Raises:
        InvalidInput: The file has another format.
    """
    if path.suffix == ".parquet":
        for index, record in enumerate(iter_rows(read_table(path, field=_FIELD))):
            yield row_place(path, index), index, record
        return
    if path.suffix not in (".json", ".jsonl"):
        raise InvalidInput(f"{path}: a source file must be .parquet, .json or .jsonl", field=_FIELD)
    with path.open(encoding="utf-8-sig") as file:
        is_array = file.read(1024).lstrip().startswith("[")
    for where, index, value in _read_array(path) if is_array else _read_lines(path, bad):
        if isinstance(value, dict):
            yield where, index, value
        else:
            bad.add(where, f"a {type(value).__name__}, not an object")


def _first_match(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return next((files for pattern in patterns if (files := sorted(folder.glob(pattern)))), [])


def _download(format: Format, source: str, revision: str | None) -> Path:
    if not _HUB_ID.fullmatch(source):
        raise NotFound(f"{source} does not exist and is not the id of a dataset on the Hub", field=_FIELD)
    patterns = [pattern for patterns in format.files.values() for pattern in patterns]
    try:
        folder = huggingface_hub.snapshot_download(
            source, repo_type="dataset", revision=revision, allow_patterns=patterns
        )
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        message = f"{source} does not exist here, and you cannot see a dataset of this id on the Hugging Face Hub"
        raise NotFound(message + (f" at revision {revision}" if revision else ""), field=_FIELD) from error
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        message = f"{source} does not exist here, and the Hugging Face Hub is unreachable ({reason})"
        raise Unavailable(f"{message}: give --source a local copy", field=_FIELD) from error
    return Path(folder)


def _read_array(path: Path) -> Iterator[tuple[str, int, object]]:
    try:
        records = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise InvalidInput(f"{path} is not JSON: {error}", field=_FIELD) from error
    for index, record in enumerate(records):
        yield row_place(path, index), index, record


def _read_lines(path: Path, bad: BadRows) -> Iterator[tuple[str, int, object]]:
    with path.open(encoding="utf-8-sig") as file:
        for index, line in enumerate(file):
            if not line.strip():
                continue
            where = f"{path} line {index + 1}"
            try:
                yield where, index, json.loads(line)
            except json.JSONDecodeError as error:
                bad.add(where, f"not JSON: {error}")


_TEXT_COLUMNS = ("prompt", "answer", "source", "solution")
_SCHEMA = pa.schema([*((name, pa.string()) for name in _TEXT_COLUMNS), ("index", pa.int64())])


class _Row(TypedDict):
    prompt: str
    answer: str
    source: str
    solution: str
    index: int


@dataclass(frozen=True)
class ConversionReport:
    """The result of a conversion."""

    dataset: str
    source: str
    files: Mapping[Split, Path]
    num_rows: Mapping[Split, int]
    dropped: tuple[str, ...]
    """`<file> <row or line>: <reason>` of every bad row."""
    num_held_out: int
    """Number of test rows that were taken from train because the source has no test split."""


def convert(format: Format, source: str, out: Path, options: ConversionOptions) -> ConversionReport:
    """Writes the splits of `source` to `out`; on an error, writes no file.

    Raises:
        NotFound: There is no such path or Hub dataset, or it has no files of this format.
        Unavailable: The Hub is unreachable.
        InvalidInput: Rows are bad and `options.bad_rows` is "fail", or there are too few rows.
    """
    bad = BadRows(source, "bad", "Fix them, or drop them with --bad-rows drop")
    instruction = format.instruction if options.instruction is None else options.instruction
    splits: dict[Split, list[_Row]] = {}
    for split, paths in find_files(format, source, options.revision).items():
        splits[split] = [row for path in paths for row in _rows(format, path, instruction, bad)]
    num_good = sum(map(len, splits.values()))
    bad.settle(options.bad_rows, total=num_good + len(bad.rows), field="source")
    num_held_out = 0
    if "test" not in splits and options.test_size:
        splits = _hold_out(splits["train"], options.test_size)
        num_held_out = len(splits["test"])
    if empty := [split for split, rows in splits.items() if not rows]:
        raise InvalidInput(f"{source} has no rows for {empty[0]}", field="source")
    files = write_splits({split: pa.Table.from_pylist(rows, _SCHEMA) for split, rows in splits.items()}, out)
    num_rows: dict[Split, int] = {split: len(rows) for split, rows in splits.items()}
    return ConversionReport(format.name, source, files, num_rows, tuple(bad.rows), num_held_out)


def write_splits(tables: Mapping[Split, pa.Table], out: Path) -> dict[Split, Path]:
    """Writes `<out>/<split>.parquet` for each split and returns the paths."""
    files: dict[Split, Path] = {split: out / f"{split}.parquet" for split in tables}
    write_tables({files[split]: table for split, table in tables.items()})
    return files


def _rows(format: Format, path: Path, instruction: str, bad: BadRows) -> list[_Row]:
    rows: list[_Row] = []
    for where, index, record in read_records(path, bad):
        try:
            example = format.parse(record)
        except BadRow as error:
            bad.add(where, error)
            continue
        rows.append(_row(example, format.name, index, instruction))
    return rows


def _row(example: Example, source: str, index: int, instruction: str) -> _Row:
    prompt = f"{example.problem}\n\n{instruction}" if instruction else example.problem
    answer, solution = example.answer, example.solution
    return {"prompt": prompt, "answer": answer, "source": source, "solution": solution, "index": index}


def _hold_out(rows: list[_Row], num_problems: int) -> dict[Split, list[_Row]]:
    """Moves the problems with the lowest hashes to test, independent of row order; copies of a problem go together."""
    hashes = [hashlib.blake2b(" ".join(row["prompt"].split()).encode(), digest_size=16).digest() for row in rows]
    ranked = sorted(set(hashes))
    if num_problems >= len(ranked):
        message = f"--test-size {num_problems} leaves nothing to train on: the source has {len(ranked)} problems"
        raise InvalidInput(message, field="test_size")
    test = set(ranked[:num_problems])
    splits: dict[Split, list[_Row]] = {"train": [], "test": []}
    for row, digest in zip(rows, hashes, strict=True):
        splits["test" if digest in test else "train"].append(row)
    return splits


SEARCH_INSTRUCTION = (
    "Answer the question below. Whenever you learn something new, think about it first, between <think> and </think>. "
    "If you need to know more, write what to look for between <search> and </search>; the documents that are found "
    "follow between <information> and </information>. You may search several times. When you know the answer, write it "
    "between <answer> and </answer>, in as few words as possible and without an explanation, such as "
    "<answer> Beijing </answer>."
)

_QUESTIONS = pa.schema(
    [("prompt", pa.string()), ("answer", pa.string()), ("answers", pa.list_(pa.string())), ("source", pa.string())]
)
_CORPUS = pa.schema([("title", pa.string()), ("text", pa.string())])
_ANSWER_COLUMNS = ("golden_answers", "answers", "answer")
_DOCUMENTS_AT_ONCE = 65536


def make_search_files(
    questions: Mapping[Split, Path], corpus: Path, out: Path, bad_rows: Literal["fail", "drop"]
) -> ConversionReport:
    """Writes a file for each split of questions, and corpus.parquet; on an error, writes no file.

    Raises:
        NotFound: A file does not exist.
        InvalidInput: A file has no usable row, or a bad one and `bad_rows` is "fail".
    """
    for path in (*questions.values(), corpus):
        if not path.is_file():
            raise NotFound(f"{path} does not exist or is no file", field="source")
    bad = BadRows(str(corpus), "bad", "Fix them, or drop them with --bad-rows drop")
    splits: dict[Split, pa.Table] = {}
    for split, path in questions.items():
        rows = [row for where, _, record in read_records(path, bad) if (row := _question(record, path, where, bad))]
        splits[split] = pa.Table.from_pylist(rows, _QUESTIONS)
    documents = pa.Table.from_batches(_documents(corpus, bad), _CORPUS)
    num_good = documents.num_rows + sum(table.num_rows for table in splits.values())
    bad.settle(bad_rows, total=num_good + len(bad.rows), field="source")
    tables = {out / f"{split}.parquet": table for split, table in splits.items()} | {out / "corpus.parquet": documents}
    if empty := [path.name for path, table in tables.items() if not table.num_rows]:
        raise InvalidInput(f"there are no rows for {empty[0]}", field="source")
    write_tables(tables)
    num_rows: dict[Split, int] = {split: table.num_rows for split, table in splits.items()}
    files: dict[Split, Path] = {split: out / f"{split}.parquet" for split in splits}
    source = f"{', '.join(map(str, questions.values()))}; {documents.num_rows} documents of {corpus}"
    return ConversionReport("search-r1", source, files, num_rows, tuple(bad.rows), num_held_out=0)


def _question(record: Record, path: Path, where: str, bad: BadRows) -> dict[str, object] | None:
    try:
        question, answers = text(record, "question"), _answers(record)
    except BadRow as error:
        bad.add(where, error)
        return None
    prompt = f"{SEARCH_INSTRUCTION}\n\nQuestion: {question}"
    return {"prompt": prompt, "answer": answers[0], "answers": answers, "source": path.stem}


def _answers(record: Record) -> list[str]:
    column = next((name for name in _ANSWER_COLUMNS if name in record), None)
    if column is None:
        raise BadRow(f"no column {' or '.join(_ANSWER_COLUMNS)}, only {', '.join(record)}")
    value = record[column]
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not found or not all(isinstance(a, str) and a.strip() for a in found):
        raise BadRow(f"{column} is neither text nor a list of texts")
    return [answer.strip() for answer in found]


def _documents(path: Path, bad: BadRows) -> Iterator[pa.RecordBatch]:
    rows: list[dict[str, str | None]] = []
    for where, _, record in read_records(path, bad):
        try:
            rows.append(_document(record))
        except BadRow as error:
            bad.add(where, error)
        if len(rows) == _DOCUMENTS_AT_ONCE:
            yield pa.RecordBatch.from_pylist(rows, _CORPUS)
            rows = []
    yield pa.RecordBatch.from_pylist(rows, _CORPUS)


def _document(record: Record) -> dict[str, str | None]:
    if "contents" not in record:
        return {"title": record.get("title") and text(record, "title"), "text": text(record, "text")}
    title, _, body = text(record, "contents").partition("\n")
    if not body.strip():
        return {"title": None, "text": title}
    return {"title": title.strip().strip('"'), "text": body.strip()}
