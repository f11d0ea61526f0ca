"""Reads Parquet files with errors that name the file, and writes them atomically."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from services.common.errors import InvalidInput, NotFound
from services.common.files.storage import replacing, writing
from services.coordinator.data.reading.record import Record, Unusable

_ROWS_AT_ONCE = 4096


def read_table(path: Path, *, field: str) -> pa.Table:
    """Reads a whole file. `field` is the config key that errors name.

    Raises:
        NotFound: The file does not exist.
        InvalidInput: The path is a directory or a pipe, or the file is not a Parquet file.
    """
    if path.is_dir():
        names = sorted(str(file.relative_to(path)) for file in path.rglob("*.parquet"))
        listed = f"; it holds {', '.join(names[:5])}" if names else " without any Parquet file"
        if not names and any(path.glob("*.jsonl")):
            listed = f": name its files, as {path}/*.jsonl"
        if any(path.rglob("*.arrow")):  # what Dataset.save_to_disk writes
            listed = ", and Arrow files are not read: write one Parquet file with Dataset.to_parquet(FILE)"
        raise InvalidInput(f"{field}: {path} is a directory{listed}", field=field)
    if not path.is_file():
        if path.exists():
            raise InvalidInput(f"{field}: {path} is not a regular file: write its rows to one", field=field)
        is_id = len(path.parts) == 2 and not (path.suffix or path.is_absolute() or path.parent.exists())
        hub = f"; if it is a data set on the Hub, write hf://datasets/{path}" if is_id else ""
        raise NotFound(f"{field}: {path} does not exist{hub}", field=field)
    try:
        return pq.ParquetFile(path).read()
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise InvalidInput(f"{field}: {path} is not a readable Parquet file: {reason}", field=field) from error


class ParquetRows:
    """The rows of a table. A column is converted when it is first read."""

    def __init__(self, path: Path, table: pa.Table):
        self._path, self._table = path, table
        self.types: Mapping[str, pa.DataType] = dict(zip(table.column_names, table.schema.types, strict=True))

    def __len__(self) -> int:
        return self._table.num_rows

    def __iter__(self) -> Iterator[tuple[str, Record]]:
        """Yields the place of each row, as messages name it, and the row. Structs have no fields that are null, because
        Parquet has no other way to say that an object does not have a key. A column that is null stays null.
        """
        index = 0
        for batch in self._table.to_batches(max_chunksize=_ROWS_AT_ONCE):
            columns = _Columns(batch)
            for number in range(batch.num_rows):
                yield row_place(self._path, index), _Row(columns, number)
                index += 1


class _Columns(dict[str, list[object]]):
    """The values of those columns of a batch that were read."""

    def __init__(self, batch: pa.RecordBatch):
        super().__init__()
        self.batch = batch
        self.times = Counter(batch.schema.names)
        """Name -> number of columns that have it. The schema makes a new list of its names whenever it is asked."""

    def __missing__(self, name: str) -> list[object]:
        if self.times[name] > 1:
            values: list[object] = [Unusable("the values of several columns of this name")] * self.batch.num_rows
        else:
            values = [_without_nulls(value) for value in _values(self.batch.column(name))]
        self[name] = values
        return values


def _values(column: pa.Array) -> list[object]:
    try:
        return column.to_pylist()
    except UnicodeDecodeError:  # pyarrow does not check text that it reads
        return [_value(scalar) for scalar in column]


def _value(scalar: pa.Scalar) -> object:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return Unusable("text that is not UTF-8")


class _Row(Record):
    def __init__(self, columns: _Columns, number: int):
        self._columns, self._number = columns, number

    def __getitem__(self, name: str) -> object:
        return self._columns[name][self._number]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns.times)

    def __len__(self) -> int:
        return len(self._columns.times)

    def __contains__(self, name: object) -> bool:
        return name in self._columns.times


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def row_place(path: Path, index: int) -> str:
    """Returns how messages name a row of a file that has no lines, counted from 1 as lines are."""
    return f"{path} row {index + 1}"


def write_tables(tables: Mapping[Path, pa.Table]) -> None:
    """Writes all files under temporary names, then renames them. If a write fails, existing files stay unchanged.

    Raises:
        PreconditionFailed: STORAGE_FAILED.
    """
    with ExitStack() as renamed:
        for path, table in tables.items():
            renamed.enter_context(writing(path))
            path.parent.mkdir(parents=True, exist_ok=True)
            file = renamed.enter_context(replacing(path))
            pq.write_table(table, file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())  # before the first is renamed: some disks say only now that they are full
