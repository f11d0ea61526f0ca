"""Opens files whose paths come from a config or a model: only regular files, so that no FIFO makes a service wait."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, cast

from services.common.errors import InvalidInput


def is_there(path: Path, *, field: str) -> bool:
    """Returns whether `path` is a regular file, or a link to one, and False if nothing has this name.

    Raises:
        InvalidInput: It is something else, such as a directory, a FIFO or a link to nothing, or cannot be looked at.
    """
    try:
        if path.is_file():
            return True
        is_other = path.exists() or path.is_symlink()
    except OSError as error:
        raise InvalidInput(f"{field}: {path} cannot be read: {error.strerror}", field=field) from error
    if is_other:
        raise InvalidInput(f"{field}: {path} is not a regular file", field=field)
    return False


def read_regular(path: Path, *, field: str) -> bytes:
    """Returns the content of a file for which `is_there` is true.

    Raises:
        InvalidInput: It cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"{field}: {path} cannot be read: {error.strerror}", field=field) from error


def open_plain_file(path: Path) -> BinaryIO:
    """Opens a regular file, or a link to one, for reading. Does not wait for the writer of a named pipe.

    Raises:
        OSError: The file cannot be opened, or is a pipe, a device, a socket or a directory.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(handle, "rb")


def parse_object(content: bytes, source: Path, *, field: str) -> dict[str, Any]:
    """Returns the JSON object that `content`, read from the file `source`, is.

    Raises:
        InvalidInput: It is not JSON, is nested too deeply, or is not an object.
    """
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{field}: {source} is not JSON: {error}", field=field) from error
    if not isinstance(parsed, dict):
        raise InvalidInput(f"{field}: {source} is not a JSON object", field=field)
    return cast(dict[str, Any], parsed)
