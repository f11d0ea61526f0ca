"""Reads the files of rows that a config names: Parquet or JSON Lines, on this host or on the Hugging Face Hub."""

import json
from collections.abc import Mapping
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


def read_rows(path: Path, *, field: str) -> pa.Table:
    """Reads a whole file. `field` is the config key that errors name.

    Args:
        path: A Parquet file, or one of JSON objects, one a line, that ends in .jsonl or .ndjson; or such a file in a
            dataset on the Hub: hf://datasets/OWNER/NAME/FILE or hf://datasets/OWNER/NAME@REVISION/FILE.
        field: The config key that names the path.

    Raises:
        NotFound: The file does not exist.
        InvalidInput: The file cannot be read. The message names the first line that cannot be used.
        Unavailable: The Hub is unreachable, and the file was not downloaded before.
    """
    if str(path).startswith("hf:"):
        path = dataset_file(str(path), field)
    return _read_json_lines(path, field) if path.suffix in _JSON_LINES else read_table(path, field=field)


def _read_json_lines(path: Path, field: str) -> pa.Table:
    """Returns a table with the keys of all lines as columns, in the order of their first use. A missing key is null."""
    if not path.is_file():
        raise NotFound(f"{field}: {path} does not exist", field=field)
    rows: list[Mapping[str, Any]] = []
    with path.open(encoding="utf-8") as file:
        try:
            rows = [_object(line, f"{path} line {number}") for number, line in enumerate(file, 1) if line.strip()]
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"{field}: {path} is not JSON Lines: {error}", field=field) from error
    columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
    return pa.table(
        {name: _column(values, f"{field}: column {name} of {path}", field) for name, values in columns.items()}
    )


def _object(line: str, where: str) -> Mapping[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where} is a {type(value).__name__}, not an object")
    return cast(dict[str, Any], value)


def _column(values: list[Any], what: str, field: str) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError) as error:
        reason = " ".join(str(error).split())
        raise InvalidInput(f"{what} has values of different types: {reason}", field=field) from error
