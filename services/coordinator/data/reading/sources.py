"""Reads the files of rows that a config names: Parquet or text, on this host or on the Hugging Face Hub."""

import codecs
import csv
import glob
import gzip
import io
import json
import logging
import math
import os
import sys
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, cast

import pyarrow as pa

from services.common.errors import InvalidInput, NotFound
from services.common.json_values import JsonObject
from services.common.memory import usable_memory
from services.coordinator.data.reading.hub import dataset_file, dataset_files
from services.coordinator.data.reading.parquet import ParquetRows, read_table, row_place
from services.coordinator.data.reading.record import MAX_DEPTH, BadRows, Record, Unusable, depth_of, in_words

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
"""The type of a column of messages, whatever other keys they have."""

_GZIP = b"\x1f\x8b"
# Of rows that are read one by one; a gzip file of a few MB may have a line that is larger than the memory.
_MOST_OF_LINE = 1 << 26


class TextRows:
    """The rows of a file as they were written: each has its own keys, in its own order.

    JSON Lines are kept as text until they are read, because objects take several times the memory.
    """

    def __init__(self, path: Path, rows: Sequence[JsonObject | bytes], lines: Sequence[int]):
        """Finds the columns. `lines` are the rows' lines, counted from 1; empty for a JSON list, which has none."""
        self._path, self._rows, self._lines = path, rows, lines
        firsts: JsonObject = {}
        for _, row in self:
            for name, value in row.items():
                first = firsts.get(name)
                if first is None or first in ("", []) or isinstance(first, Unusable):
                    firsts[name] = value
        self.types: Mapping[str, pa.DataType] = {name: _type_of(value) for name, value in firsts.items()}
        """Column -> Arrow type of its first value that is not empty. Other rows may have values of other types."""

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[tuple[str, Record]]:
        """Yields the place of each row, as messages name it, and the row."""
        for index, row in enumerate(self._rows):
            where = f"{self._path} line {self._lines[index]}" if self._lines else row_place(self._path, index)
            yield where, _object(row, where) if isinstance(row, bytes) else row


def _read_text_rows(path: Path, form: str, *, field: str, max_rows: int | None) -> TextRows:
    name, read = _FORMS[form]
    try:
        rows = read(_content(path), path, max_rows)
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidInput(f"{field}: {path} cannot be read: {error}", field=field) from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{field}: {path} is not {name}: {error}", field=field) from error
    if not len(rows):
        raise InvalidInput(f"{field}: {path} is empty", field=field)
    return rows


def _content(path: Path) -> bytes:
    """Returns the text of a file in UTF-8, without compression and byte order mark, which is no part of it."""
    content = path.read_bytes()
    if content.startswith(_GZIP):
        content = _unpacked(path)
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return content.decode("utf-16").encode()
    return content.removeprefix(codecs.BOM_UTF8)


def _unpacked(path: Path) -> bytes:
    """Returns the content of a gzip file, of which a few MB may be more than there is memory for."""
    content, memory = bytearray(), usable_memory()
    most = memory[1] / 3 * 2**30 if memory else math.inf  # the bytes that are returned, and their lines, are copies
    with gzip.open(path) as file:
        while part := file.read(1 << 20):
            content += part
            if len(content) > most:
                raise OSError(f"it unpacks to over {most / 2**30:.1f} GiB, a third of the memory that is available")
    return bytes(content)


def _read_json_lines(content: bytes, path: Path, max_rows: int | None) -> TextRows:
    rows: list[JsonObject | bytes] = []
    lines = array("Q")
    # Lines of bytes end with \n or \r only. Lines of text would also end with U+2028, which JSON may contain.
    for number, line in enumerate(chain.from_iterable(map(bytes.splitlines, io.BytesIO(content))), 1):
        if len(rows) == max_rows:
            break
        if line.strip():
            rows.append(line)
            lines.append(number)
    return TextRows(path, rows, lines)


def _read_json(content: bytes, path: Path, max_rows: int | None) -> TextRows:
    if not content.lstrip().startswith(b"["):
        return _read_json_lines(content, path, max_rows)
    rows = _DECODER.decode(_text(content, str(path), has_lines=True))[:max_rows]
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"{row_place(path, index)} is {in_words(row)}, not an object")
    return TextRows(path, rows, ())


def _read_csv(content: bytes, path: Path, max_rows: int | None) -> TextRows:
    csv.field_size_limit(sys.maxsize)  # by default 128 KiB
    # Without `strict`, a quote that is never closed would make one cell of the rest of the file.
    reader = csv.reader(io.StringIO(_text(content, str(path), has_lines=True), newline=""), strict=True)
    rows: list[JsonObject | bytes] = []
    lines, begin = array("Q"), 1
    names: list[str] = []
    try:
        for cells in reader:
            if cells and not names:
                names = _columns(cells)
            elif cells and len(rows) != max_rows:
                if len(cells) != len(names):
                    raise ValueError(f"{path} line {begin} has {len(cells)} cells, the first line {len(names)}")
                rows.append(dict(zip(names, cells, strict=True)))
                lines.append(begin)
            begin = reader.line_num + 1  # not one line a row: a cell in quotes may have several
    except csv.Error as error:
        raise ValueError(f"{path} line {begin}: {error}") from error
    return TextRows(path, rows, lines)


def _columns(names: list[str]) -> list[str]:
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"its first line names {twice[0]} twice")
    if len(names) == 1 and (separators := {";", "\t"}.intersection(names[0])):
        raise ValueError(f"its first line has {separators.pop()!r} between columns: write commas instead")
    return names


_FORMS: Mapping[str, tuple[str, Callable[[bytes, Path, int | None], TextRows]]] = {
    ".jsonl": ("JSON Lines", _read_json_lines),
    ".ndjson": ("JSON Lines", _read_json_lines),
    ".json": ("a JSON list of objects, or one object a line", _read_json),
    ".csv": ("CSV", _read_csv),
}
"""Ending of a file's name -> what the file must be, and the function that reads it."""


def _text(content: bytes, where: str, *, has_lines: bool) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        place = f"{where} line {number}" if has_lines else where
        raise ValueError(f"{place} has the byte 0x{content[error.start]:02x}: save the file as UTF-8") from error


def _object(line: bytes, where: str) -> JsonObject:
    text = _text(line, where, has_lines=False)
    if depth_of(text) > MAX_DEPTH:
        raise ValueError(f"{where} nests more than {MAX_DEPTH} levels deep")
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {in_words(value)}, not an object")
    return cast(JsonObject, value)


def _members(pairs: list[tuple[str, object]]) -> JsonObject:
    """Returns an object. Which value was meant by a key that it has twice is unknown."""
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        members |= {name: Unusable(f"the key {name!r} twice") for name in names if names.count(name) > 1}
    return members


def _integer(text: str) -> int | Unusable:
    try:
        return int(text)
    except ValueError:  # Python converts no more digits, here and wherever the row is sent
        return Unusable(f"an integer of {len(text)} digits")


def _number(text: str) -> float | Unusable:
    value = float(text)
    return value if math.isfinite(value) else Unusable(f"{text:.20}, which is above the largest number")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_members,
    parse_int=_integer,
    parse_float=_number,
    parse_constant=lambda text: Unusable(f"{text}, which is not JSON"),
)


def _type_of(value: object) -> pa.DataType:
    if isinstance(value, Unusable):
        return pa.null()
    if isinstance(value, list) and value and all(isinstance(one, dict) and "role" in one for one in value):
        return MESSAGES
    try:
        return pa.infer_type([value])
    except (pa.ArrowException, ValueError, TypeError, OverflowError):  # its parts are of several types
        return {list: pa.list_(pa.null()), dict: pa.struct([])}.get(type(value), pa.int64())


_log = logging.getLogger(__name__)

_MAGIC = b"PAR1"
_START = 1024  # bytes in which the first character of JSON stands
_SUFFIXES = (".parquet", *_FORMS, *(f"{suffix}.gz" for suffix in _FORMS))

Rows = ParquetRows | TextRows


def files_of(path: Path, *, field: str) -> list[Path]:
    """Returns the files that a path of a config names: itself, those that match its pattern, sorted, or files of a
    dataset on the Hub.

    Raises:
        NotFound: No file matches the pattern.
        LockstepError: See `dataset_files`.
    """
    if str(path).startswith("hf:"):
        return [Path(url) for url in dataset_files(str(path), field, suffixes=_SUFFIXES)]
    if not glob.has_magic(str(path)) or path.exists():
        return [path]
    files = [file for file in map(Path, sorted(glob.glob(str(path), recursive=True))) if file.is_file()]
    if not files:
        raise NotFound(f"{field}: no file matches {path}", field=field)
    return files


def warn_of_shared_files(train: Sequence[Path], held_out: Mapping[str, Path]) -> None:
    """Logs a warning for each file that `train` has twice, and for each that `held_out` has too."""
    trained = Counter(file for path in train for file in _identities(path, "data.train"))
    for file, number in trained.items():
        if number > 1:
            _log.warning("data.train has %s %d times: its rows count as often", file, number)
    for name, path in held_out.items():
        for file in trained.keys() & _identities(path, f"data.eval.{name}"):
            shared = "data.eval.%s is %s, which data.train has too: the run is evaluated on what it is trained on"
            _log.warning(shared, name, file)


def _identities(path: Path, field: str) -> list[Path]:
    """Returns the files that a path names; those of the Hub as they are named, because asking it takes a while."""
    if str(path).startswith("hf:"):
        return [path]
    return [Path(os.path.realpath(file)) for file in files_of(path, field=field)]  # Path.resolve fails on a loop


def read_rows(path: Path, *, field: str, max_rows: int | None = None) -> Rows:
    """Reads a file, or only its first `max_rows` rows.

    Args:
        path: A file in Parquet, or one whose name ends with a key of `_FORMS`, also with .gz; or such a file in a
            dataset on the Hub: hf://datasets/OWNER/NAME/FILE or hf://datasets/OWNER/NAME@REVISION/FILE.
        field: The config key that names the path.
        max_rows: All rows if None.

    Raises:
        NotFound: The file does not exist.
        InvalidInput: The file cannot be read, or is empty. The message names the first line that cannot be used.
        Unavailable: The Hub is unreachable, and the file was not downloaded before.
    """
    if str(path).startswith("hf:"):
        path = dataset_file(str(path), field)
    form = Path(path.name.lower().removesuffix(".gz")).suffix
    try:
        is_text = form != ".parquet" and path.is_file() and not _is_parquet(path)
    except OSError as error:
        raise InvalidInput(f"{field}: {path} cannot be read: {error.strerror}", field=field) from error
    if is_text:
        if form in _FORMS:
            return _read_text_rows(path, form, field=field, max_rows=max_rows)
        forms = f"{', '.join(_FORMS)} (these also with .gz)"
        known = f"its name must end in .parquet, {forms}"
        fix = "write it as Parquet with Dataset.to_parquet(FILE)" if form == ".arrow" else known
        raise InvalidInput(f"{field}: {path} is of no known form: {fix}", field=field)
    return ParquetRows(path, read_table(path, field=field).slice(0, max_rows))


def read_usable(path: Path, bad: BadRows, *, field: str) -> Iterator[tuple[str, int, Record]]:
    """Yields place, index and content of each row of a file that `read_rows` reads. Adds lines and values that are no
    JSON objects to `bad`, and does not keep the rows: a corpus has millions.

    Raises:
        LockstepError: See `read_rows`.
    """
    form = Path(path.name.lower().removesuffix(".gz")).suffix
    try:
        if form in (".jsonl", ".ndjson", ".json") and path.is_file() and not _is_parquet(path):
            yield from _usable_rows(path, form, bad)
            return
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidInput(f"{field}: {path} cannot be read: {error}", field=field) from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{field}: {path} is not JSON: {error}", field=field) from error
    for index, (where, row) in enumerate(read_rows(path, field=field)):
        yield where, index, row


def _usable_rows(path: Path, form: str, bad: BadRows) -> Iterator[tuple[str, int, Record]]:
    with _opened(path) as file:
        is_list = file.read(_START).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
        file.seek(0)
        if form == ".json" and is_list:
            for index, value in enumerate(_DECODER.decode(_text(_content(path), str(path), has_lines=True))):
                if isinstance(value, dict):
                    yield row_place(path, index), index, value
                else:
                    bad.add(row_place(path, index), f"{in_words(value)}, not an object")
            return
        for index, line in enumerate(_lines(file)):
            where, text = f"{path} line {index + 1}", line if index else line.removeprefix(codecs.BOM_UTF8)
            if not text.strip():
                continue
            try:
                row = _object(text, where)
            except ValueError as error:
                bad.rows.append(str(error))
            else:
                yield where, index, row


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    for text in iter(partial(file.readline, _MOST_OF_LINE), b""):
        if len(text) == _MOST_OF_LINE:
            raise ValueError(f"it has a line of more than {_MOST_OF_LINE:,} bytes")
        yield from text.splitlines()


def _opened(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        start = file.read(2)
    if start not in (_GZIP, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return path.open("rb")
    return cast(IO[bytes], gzip.open(path)) if start == _GZIP else io.BytesIO(_content(path))


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC
