"""Writes and verifies checkpoint directories, and completes exports.

A manifest with the SHA-256 of every file is written last; a directory without it is not a checkpoint. The directory is
written under another name and then renamed, so that a reader finds a complete checkpoint or none.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from services.common.errors import DataLoss, InvalidInput, LockstepError, NotFound
from services.common.files import is_of_disk, storage_error
from services.common.json_values import JsonMapping

_MANIFEST = "manifest.json"
_INSTEAD = "; restore it, or go on from an earlier checkpoint, with resume set to its path"
_NUM_READERS = 8


@dataclass(frozen=True)
class TrainState:
    """A checkpoint's state besides tensors."""

    version: int
    last_batch_id: str
    last_metrics: dict[str, float]
    digests: Mapping[str, str] = field(default_factory=dict)
    """Digests of the newest published weights by version, as far as samples of them may still arrive."""
    last_batch_sha256: str = ""
    """SHA-256 of the samples of the last batch (blocks.content_sha256)."""
    last_header: JsonMapping = field(default_factory=dict)
    """The values of the last batch's header (contract.header_values)."""
    skipped_in_a_row: int = 0
    """Number of batches up to the last one of which no update was applied (OptimConfig.on_nonfinite)."""
    made_with: JsonMapping = field(default_factory=dict)
    """Values by config key without which the tensors are another model, such as the adapters' `lora.alpha`."""


def staging(path: Path) -> Path:
    """Returns the directory in which the ranks write before `finish` moves it to `path`, which must not exist."""
    if path.exists():
        raise InvalidInput(f"path: {path} exists already", field="path")
    if "\0" in str(path):
        raise InvalidInput(f"path: {str(path)!r} has a NUL character", field="path")
    return path.with_name(f".{path.name}.partial")


def begin(path: Path) -> Path:
    """Makes an empty staging directory for `path`, and deletes what interrupted saves left.

    This includes saves of other steps: a run that resumed with another `save_freq` may not reach them again.
    """
    try:
        partial = staging(path)
        others = path.parent.glob(".step-*.partial") if path.name.startswith("step-") else ()
        for left in (partial, *others):
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        if is_of_disk(error):
            raise storage_error(path, error) from error
        raise InvalidInput(f"path: {path} cannot be made: {error}", field="path") from error
    return partial


@contextmanager
def staged(path: Path) -> Iterator[None]:
    """Makes the staging directory for the block, which saves `path`. If the block fails, the directory is deleted."""
    partial = begin(path)
    try:
        yield
    except LockstepError:
        shutil.rmtree(partial, ignore_errors=True)  # it may be what fills the disk
        raise


def finish(path: Path, state: TrainState) -> tuple[int, str]:
    """Writes the manifest and moves the staged files to `path`; returns their bytes and the manifest's SHA-256."""
    partial, files = staging(path), _staged_files(path)
    content = json.dumps({"state": asdict(state), "files": files}, indent=1).encode()
    (partial / _MANIFEST).write_bytes(content)
    _move(partial, path)
    return sum(int(file["num_bytes"]) for file in files.values()), hashlib.sha256(content).hexdigest()


def finish_export(path: Path) -> None:
    """Writes SHA256SUMS, for `sha256sum --check`, and moves the staged files of an export to `path`."""
    partial, files = staging(path), _staged_files(path)
    (partial / "SHA256SUMS").write_text("".join(f"{file['sha256']}  {name}\n" for name, file in files.items()))
    _move(partial, path)


def verify(path: Path) -> TrainState:
    """Reads the state of a checkpoint after comparing every file with the manifest.

    Raises:
        NotFound: There is no checkpoint at `path`.
        DataLoss: A file is missing, cut short or changed; names it.
    """
    manifest = path / _MANIFEST
    try:
        if not manifest.is_file():
            raise NotFound(f"checkpoint {path}: no {_MANIFEST} there", field="path")
        content = json.loads(manifest.read_bytes())
        state, files = TrainState(**content["state"]), {**content["files"]}
    except OSError as error:
        raise NotFound(f"checkpoint {path}: {_MANIFEST} cannot be read: {error.strerror}", field="path") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataLoss(f"checkpoint {path}: {_MANIFEST} is damaged: {error}") from error
    try:
        missing = [name for name in files if not (path / name).is_file()]
    except OSError as error:  # a name that no disk takes
        raise DataLoss(f"checkpoint {path}: {_MANIFEST} is damaged: {error.strerror} in its files") from error
    if missing:
        raise DataLoss(f"checkpoint {path}: {missing[0]} is missing{_INSTEAD}")
    for name, described in _described(path, files).items():
        if described != files[name]:
            raise DataLoss(f"checkpoint {path}: {name} is not the file that was written{_INSTEAD}")
    return state


def _move(partial: Path, path: Path) -> None:
    # In this order, or after a power failure the new name could be there without the content.
    for entry in (*partial.rglob("*"), partial):
        _fsync(entry)
    partial.rename(path)
    _fsync(path.parent)


def _staged_files(path: Path) -> dict[str, dict[str, int | str]]:
    directory = staging(path)
    files = [str(file.relative_to(directory)) for file in sorted(directory.rglob("*")) if file.is_file()]
    return _described(directory, files)


def _described(directory: Path, names: Collection[str]) -> dict[str, dict[str, int | str]]:
    """Returns size and SHA-256 of each file. hashlib lets other threads run, so several are read at once."""
    with ThreadPoolExecutor(_NUM_READERS) as pool:
        return dict(zip(names, pool.map(_describe, (directory / name for name in names)), strict=True))


def _describe(file: Path) -> dict[str, int | str]:
    with file.open("rb") as stream:
        return {"num_bytes": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
