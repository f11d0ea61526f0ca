"""Reads the files of rows that a config names: Parquet or JSON Lines, on this host or on the Hugging Face Hub."""

import json
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from services.common.errors import InvalidInput, NotFound
from services.coordinator.data.reading.hub import dataset_file, dataset_files
from services.coordinator.data.reading.parquet import read_table

_JSON_LINES = (".jsonl", ".ndjson")


def files_of(path: Path, *, field: str) -> list[Path]:
    """Returns the files that a path of a config names: itself, or files of a dataset on the Hub.

    Raises:
        LockstepError: See `dataset_files`.
    """
    if not str(path).startswith("hf:"):
        return [path]
    return [Path(url) for url in dataset_files(str(path), field, endings=(".parquet", *_JSON_LINES))]


@dataclass(frozen=True)
class FileRows:
    """Holds the rows of a file."""

    table: pa.Table
    lines: Sequence[int]
    """Number of each row's line, counted from 1; empty if the file is Parquet."""


def read_rows(path: Path, *, field: str) -> FileRows:
    """Reads a whole file. `field` is the config key that errors name.

    Args:
        path: A Parquet file, or one of JSON objects, one a line, that ends in .jsonl or .ndjson; or such a file in a
            dataset on the Hub: hf://datasets/OWNER/NAME/FILE or hf://datasets/OWNER/NAME@REVISION/FILE.
        field: The config key that names the path.

    Raises:
        NotFound: The file does not exist.
        InvalidInput: The file cannot be read, or is empty. The message names the first line that cannot be used.
        Unavailable: The Hub is unreachable, and the file was not downloaded before.
    """
    if str(path).startswith("hf:"):
        path = dataset_file(str(path), field)
    if path.suffix in _JSON_LINES:
        return _read_json_lines(path, field)
    try:
        return FileRows(read_table(path, field=field), ())
    except InvalidInput as error:
        if path.suffix == ".parquet" or path.is_dir():
            raise
        endings = f"a file that ends in {' or '.join(_JSON_LINES)} is read as JSON Lines, any other as Parquet"
        raise InvalidInput(f"{error.message}; {endings}", field=field) from error


def _read_json_lines(path: Path, field: str) -> FileRows:
    """Returns a table with the keys of all lines as columns, in the order of their first use. A missing key is null."""
    if not path.is_file():
        raise NotFound(f"{field}: {path} does not exist", field=field)
    rows: list[Mapping[str, Any]] = []
    lines = array("Q")
    with path.open(encoding="utf-8") as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    rows.append(_object(line, f"{path} line {number}"))
                    lines.append(number)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"{field}: {path} is not JSON Lines: {error}", field=field) from error
    if not rows:
        raise InvalidInput(f"{field}: {path} is empty", field=field)
    columns: dict[str, pa.Array] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        columns[name] = _column([row.get(name) for row in rows], lines, f"{field}: column {name} of {path}", field)
    return FileRows(pa.table(columns), lines)


def _object(line: str, where: str) -> Mapping[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where} is a {type(value).__name__}, not an object")
    return cast(dict[str, Any], value)


def _column(values: list[Any], lines: Sequence[int], what: str, field: str) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError) as error:
        num_rows = bisect_left(range(len(values) + 1), True, key=lambda number: not _is_column(values[:number]))
        before, kind = (_kind(value) for value in (_first(values), values[num_rows - 1]))
        has = f"line {lines[num_rows - 1]} has {kind}, lines before it {before}"
        if before == kind:
            has = f"line {lines[num_rows - 1]} does not fit those before it: {' '.join(str(error).split())}"
        raise InvalidInput(f"{what} has values of different types: {has}", field=field) from error


def _is_column(values: list[Any]) -> bool:
    try:
        pa.array(values)
    except (pa.ArrowException, OverflowError):
        return False
    return True


def _first(values: list[Any]) -> object:
    return next((value for value in values if value is not None), None)


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "true or false"
    kinds = {str: "text", list: "a list", dict: "an object", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")
