"""Opens files whose paths come from a config or a model, and which may turn out to be something else."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


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
