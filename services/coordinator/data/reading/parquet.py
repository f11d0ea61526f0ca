"""Reads Parquet files with errors that name the file, and writes them atomically."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from services.common.errors import InvalidInput, NotFound
from services.coordinator.data.reading.record import Record

_ROWS_AT_ONCE = 4096


def read_table(path: Path, *, field: str) -> pa.Table:
    """Reads a whole file. `field` is the config key that errors name.

    Raises:
        NotFound: The file does not exist.
        InvalidInput: The path is a directory, or the file is not a Parquet file.
    """
    if path.is_dir():
        inside = sorted(str(file.relative_to(path)) for file in path.rglob("*.parquet"))
        listed = f"; it holds {', '.join(inside[:5])}" if inside else " without any Parquet file"
        raise InvalidInput(f"{field}: {path} is a directory{listed}", field=field)
    if not path.is_file():
        raise NotFound(f"{field}: {path} does not exist", field=field)
    try:
        return pq.ParquetFile(path).read()
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise InvalidInput(f"{field}: {path} is not a readable Parquet file: {reason}", field=field) from error


def row_place(path: Path, index: int) -> str:
    """Returns how messages name a row of a file that has no lines, counted from 1 as lines are."""
    return f"{path} row {index + 1}"


def iter_rows(table: pa.Table) -> Iterator[Record]:
    """Yields rows as dictionaries, in order."""
    for batch in table.to_batches(max_chunksize=_ROWS_AT_ONCE):
        yield from batch.to_pylist()


def write_tables(tables: Mapping[Path, pa.Table]) -> None:
    """Writes all files under temporary names, then renames them. If a write fails, existing files stay unchanged."""
    partial = {path: path.with_name(f".{path.name}.{os.getpid()}.partial") for path in tables}
    try:
        for path, table in tables.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with partial[path].open("wb") as file:
                pq.write_table(table, file, compression="zstd")
                file.flush()
                os.fsync(file.fileno())
        for path in tables:
            partial[path].replace(path)
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)
