"""Reads Parquet files with errors that name the file, and writes them atomically."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from services.common.errors import InvalidInput, NotFound
from services.common.files import replacing, writing
from services.common.memory import usable_memory
from services.coordinator.data.reading.record import Record, Unusable

_ROWS_AT_ONCE = 4096
_WIDTHS = {"BOOLEAN": 0.125, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8}
"""Bytes of a value in memory by its type in the file."""
_MOST_OF_DICTIONARY = 1 << 30  # Arrow's dictionaries hold 2 GiB, and a column of more text is no small file


def read_table(path: Path, *, field: str) -> pa.Table:
    """Reads a whole file. `field` is the config key that errors name.

    Raises:
        NotFound: The file does not exist.
        InvalidInput: The path is a directory or a pipe, or the file is not a Parquet file, or needs too much memory.
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
        _require_memory(path, field)
        return pq.ParquetFile(path).read()
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise InvalidInput(f"{field}: {path} is not a readable Parquet file: {reason}", field=field) from error


def _require_memory(path: Path, field: str) -> None:
    """Raises InvalidInput if the rows of a file take more memory than is available, before they are read."""
    memory, needed = usable_memory(), 0.0
    if memory is None:
        return
    for size in _sizes(path):
        needed += size / 2**30
        if needed > memory[1]:
            why = f"takes over {needed:.1f} GiB when it is read, and {memory[1]:.1f} GiB of memory are available"
            raise InvalidInput(f"{field}: {path} {why}: split it into several files, or use fewer rows", field=field)


def _sizes(path: Path) -> Iterator[float]:
    """Yields the bytes that the parts of a file take in memory, each before more of the file is read.

    The file's own numbers are those of its pages, where a text is stored once for all rows that have it: a file of a
    few kB may be gigabytes of rows. Its row groups are therefore read without repeating the texts.
    """
    file = pq.ParquetFile(path)
    lengths = [file.schema.column(number).length for number in range(file.metadata.num_columns)]
    categories = {column.name for column in file.schema_arrow if pa.types.is_dictionary(column.type)}  # stay as stored
    for index in range(file.num_row_groups):
        group = file.metadata.row_group(index)
        columns = [group.column(number) for number in range(group.num_columns)]
        for column, length in zip(columns, lengths, strict=True):
            width = _WIDTHS.get(column.physical_type, length or 4)  # a text has an offset
            yield column.num_values * width
        texts = [column for column in columns if column.physical_type == "BYTE_ARRAY"]
        yield sum(column.total_uncompressed_size for column in texts)
        repeating = [column for column in texts if _repeats_texts(column) and column.path_in_schema not in categories]
        stored = {column.path_in_schema: column.total_uncompressed_size for column in repeating}
        names = [name for name, size in stored.items() if size < _MOST_OF_DICTIONARY]
        if names:
            table = pq.ParquetFile(path, read_dictionary=names).read_row_group(index, columns=names)
            size = sum(_text_bytes(chunk) for column in table.columns for chunk in column.chunks)
            yield max(size - sum(map(stored.__getitem__, names)), 0)


def _repeats_texts(column: pq.ColumnChunkMetaData) -> bool:
    """Returns whether a column of texts has a dictionary that can be read: pyarrow reads none beside pages of deltas,
    which other writers make when a dictionary is full."""
    encodings = str(column.encodings)
    return "DICTIONARY" in encodings and "DELTA" not in encodings


def _text_bytes(array: pa.Array) -> int:
    """Returns the bytes of the texts that an array has, with those that a dictionary repeats."""
    if pa.types.is_dictionary(array.type):
        return pc.sum(pc.binary_length(array.dictionary).take(array.indices)).as_py() or 0
    if pa.types.is_struct(array.type):
        return sum(map(_text_bytes, array.flatten()))
    return _text_bytes(array.values) if pa.types.is_nested(array.type) else 0


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
