"""Converts published datasets to the prompt files that a run reads: `train.parquet` and `test.parquet`."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import pyarrow as pa

from services.common.errors import InvalidInput
from services.coordinator.data.prepare.formats import ConversionOptions, Example, Format, Split
from services.coordinator.data.prepare.sources import find_files, read_records
from services.coordinator.data.reading.bad_rows import BadRow, BadRows
from services.coordinator.data.reading.parquet import write_tables

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
    """Reports the result of a conversion."""

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
