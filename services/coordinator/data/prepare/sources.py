"""Finds the files of a published dataset, locally or on the Hugging Face Hub, and reads their records."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

from services.common.errors import InvalidInput, NotFound, Unavailable
from services.coordinator.data.prepare.formats import Format, Split
from services.coordinator.data.reading.bad_rows import BadRows
from services.coordinator.data.reading.parquet import Record, iter_rows, read_table, row_place

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
