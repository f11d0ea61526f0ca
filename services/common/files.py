"""Reads and writes files whose paths come from a config or a model; errors name the path and what to do."""

import errno
import json
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from services.common.errors import InvalidInput, PreconditionFailed, Reason
from services.common.json_values import JsonObject

_DENIED = {errno.EACCES, errno.EPERM}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FIXES = {
    **dict.fromkeys(_FULL, "free space on that disk or raise the limit"),
    **dict.fromkeys((errno.EROFS, *_DENIED), "make it writable for this user"),
    **dict.fromkeys((errno.ENOENT, errno.ESTALE, errno.ENODEV, errno.ENXIO), "bring the directory back"),
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise this host's limit of open files (sysctl fs.file-max)",
}


def is_of_disk(error: OSError) -> bool:
    """Returns whether `error` says that a disk or a limit of open files, and not the path, is at fault."""
    return error.errno in {*_FULL, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE}


@contextmanager
def writing(path: str | Path) -> Generator[None]:
    """Converts an OSError of the block, which writes `path`, to STORAGE_FAILED with the path and what to do."""
    try:
        yield
    except OSError as error:
        raise storage_error(path, error) from error


def storage_error(
    path: str | Path, error: OSError, *, done: str = "written", rank: int | None = None
) -> PreconditionFailed:
    """Returns the typed error for `error`; `done` is what the caller does with `path`, and `rank` is the trainer's, if
    known."""
    path = os.path.abspath(error.filename if isinstance(error.filename, str) and error.filename else path)
    what = error.strerror or str(error)
    fix = _FIXES.get(error.errno or 0, "check the disk")
    if done != "written" and error.errno in _DENIED:
        fix = "give this user access to it"
    who = "" if rank is None else f" (rank {rank})"
    return PreconditionFailed(
        f"{path} cannot be {done}: {what}{who}; {fix}, then run the same command again",
        reason=Reason.STORAGE_FAILED,
        path=path,
    )


@contextmanager
def replacing(path: Path) -> Generator[BinaryIO]:
    """Opens a file that takes the place of `path` when the block ends, or is deleted if the block raises."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            # Synced before it is renamed, or the host's crash could leave an empty file in place of the old one.
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Writes a file of text, which is there as a whole or as it was before. A link, a pipe or a device stays one.

    Raises:
        PreconditionFailed: STORAGE_FAILED.
    """
    # Lone surrogates, which occur only in damaged text, cannot be encoded.
    content = text.encode("utf-8", errors="replace")
    with writing(path):
        if path.exists() and not path.is_file():
            path.write_bytes(content)
            return
        with replacing(Path(os.path.realpath(path))) as file:
            file.write(content)


def is_there(path: Path) -> bool:
    """Returns whether a model has a file, which is regular or a link to such a one; False if nothing has this name.

    Raises:
        InvalidInput: It is something else, such as a directory, a FIFO or a link to nothing, or cannot be looked at.
    """
    try:
        if path.is_file():
            return True
        is_other = path.exists() or path.is_symlink()
    except OSError as error:
        raise InvalidInput(f"model: {path} cannot be read: {error.strerror}", field="model") from error
    if is_other:
        raise InvalidInput(f"model: {path} is not a regular file", field="model")
    return False


def read_regular(path: Path) -> bytes:
    """Returns the content of a model's file for which `is_there` is true."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"model: {path} cannot be read: {error.strerror}", field="model") from error


def open_plain_file(path: Path) -> BinaryIO:
    """Opens a regular file, or a link to one, for reading. Does not wait for the writer of a named pipe.

    Raises:
        OSError: The file cannot be opened, or is a pipe, a device, a socket or a directory.
    """
    # O_NONBLOCK: opening a pipe would wait for its writer. O_NOCTTY: a terminal must not become this process's own.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(handle, "rb")


def parse_object(content: bytes, source: Path) -> JsonObject:
    """Returns the JSON object that `content`, read from a model's file `source`, is."""
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"model: {source} is not JSON: {error}", field="model") from error
    if not isinstance(parsed, dict):
        raise InvalidInput(f"model: {source} is not a JSON object", field="model")
    return cast(JsonObject, parsed)
