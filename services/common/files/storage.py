"""Converts failures of disks to an error that says which path failed and what to do."""

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from services.common.errors import PreconditionFailed, Reason

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EROFS, errno.EACCES, errno.EPERM}
_GONE = {errno.ENOENT, errno.ESTALE, errno.ENODEV, errno.ENXIO}


def is_of_disk(error: OSError) -> bool:
    """Returns whether `error` says that a disk, and not the path, is at fault."""
    return error.errno in {*_FULL, errno.EROFS, errno.EIO}


@contextmanager
def writing(path: str | Path) -> Generator[None]:
    """Converts an OSError of the block, which writes `path`.

    Raises:
        PreconditionFailed: STORAGE_FAILED, with the path and what to do.
    """
    try:
        yield
    except OSError as error:
        raise storage_error(path, error) from error


def storage_error(
    path: str | Path, error: OSError, *, done: str = "written", rank: int | None = None
) -> PreconditionFailed:
    """Returns the typed error for `error`, which happened while `path` was written or read. Says what to do about it.

    `rank` is that of the trainer's rank whose disk it is, if it is known.
    """
    path = os.path.abspath(error.filename if isinstance(error.filename, str) and error.filename else path)
    what = error.strerror or str(error)
    if error.errno in _FULL:
        fix = "free space on that disk or raise the limit"
    elif error.errno in _FORBIDDEN:
        fix = "make it writable for this user"
    elif error.errno in _GONE:
        fix = "bring the directory back"
    else:
        fix = "check the disk"
    who = "" if rank is None else f" (rank {rank})"
    return PreconditionFailed(
        f"{path} cannot be {done}: {what}{who}; {fix}, then run the same command again",
        reason=Reason.STORAGE_FAILED,
        path=path,
    )
