"""Converts published datasets to the prompt files that a run reads: `train.parquet` and `test.parquet`."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import huggingface_hub
import pyarrow as pa
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

from services.common.errors import InvalidInput, NotFound, Unavailable
from services.coordinator.data.prepare.formats import ConversionOptions, Example, Format, Split
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
