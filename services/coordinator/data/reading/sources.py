"""Reads the files of rows that a config names: Parquet or text, on this host or on the Hugging Face Hub."""

import glob
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from services.common.errors import InvalidInput, NotFound
from services.coordinator.data.reading.hub import dataset_file, dataset_files
from services.coordinator.data.reading.parquet import ParquetRows, read_table
from services.coordinator.data.reading.record import Record
from services.coordinator.data.reading.text_files import FORMS, read_text_rows

_log = logging.getLogger(__name__)

_MAGIC = b"PAR1"
_ENDINGS = (".parquet", *FORMS, *(f"{ending}.gz" for ending in FORMS))


class Rows(Protocol):
    """Describes the rows of a file."""

    types: Mapping[str, pa.DataType]
    """Column -> its type; in a file of text, the type of its first value that is not empty."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[tuple[str, Record]]:
        """Yields the place of each row, as messages name it, and the row."""
        ...


def files_of(path: Path, *, field: str) -> list[Path]:
    """Returns the files that a path of a config names: itself, those that match its pattern, sorted, or files of a
    dataset on the Hub.

    Raises:
        NotFound: No file matches the pattern.
        LockstepError: See `dataset_files`.
    """
    if str(path).startswith("hf:"):
        return [Path(url) for url in dataset_files(str(path), field, endings=_ENDINGS)]
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
    return [path] if str(path).startswith("hf:") else [file.resolve() for file in files_of(path, field=field)]


def read_rows(path: Path, *, field: str, max_rows: int | None = None) -> Rows:
    """Reads a file, or only its first `max_rows` rows.

    Args:
        path: A file in Parquet, or one whose name has an ending of `text_files.FORMS`, also with .gz; or such a file in
            a dataset on the Hub: hf://datasets/OWNER/NAME/FILE or hf://datasets/OWNER/NAME@REVISION/FILE.
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
    if form != ".parquet" and path.is_file() and not _is_parquet(path):
        if form in FORMS:
            return read_text_rows(path, form, field=field, max_rows=max_rows)
        forms = f"{', '.join(FORMS)} (these also with .gz)"
        raise InvalidInput(f"{field}: {path} is of no known form: its name must end in .parquet, {forms}", field=field)
    return ParquetRows(path, read_table(path, field=field).slice(0, max_rows))


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC
