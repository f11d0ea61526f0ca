"""Wraps a SQLite connection: failures are typed errors with the file's path, and locks of others are awaited."""

import asyncio
import logging
import math
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from services.common import errors
from services.common.errors import DataLoss, LockstepError, Reason

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
SqlRow = tuple[Any, ...]

_FIXES = {
    sqlite3.SQLITE_FULL: "free space on that disk",
    sqlite3.SQLITE_READONLY: "make it writable for this user",
    sqlite3.SQLITE_PERM: "make it writable for this user",
    sqlite3.SQLITE_AUTH: "make it writable for this user",
    sqlite3.SQLITE_CANTOPEN: "bring its directory back, or make it writable for this user",
    sqlite3.SQLITE_IOERR: "check the disk",
    sqlite3.SQLITE_NOLFS: "use a disk that takes larger files",
    sqlite3.SQLITE_PROTOCOL: "keep runs_dir on a disk whose file locks work, such as a local one",
}
_LEAST_FREE_BYTES = 1 << 16
_LOCKED = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
# Waits of SQLite itself, in which Ctrl-C and the event loop have to wait too, are not longer than this.
_SLICE_S = 0.5
# A locked file can only be tried again: SQLite tells nobody when it becomes free.
_RETRY_S = 0.1
_FIRST_WARNING_S, _WARN_EVERY_S = 1.0, 60.0
# Options of NFS with which its locks do not reach other hosts (man 5 nfs).
_LOCAL_LOCKS = {"nolock", "local_lock=all", "local_lock=flock", "local_lock=posix"}
# File systems whose locks or shared memory do not reach every host, which a write-ahead log needs.
_SHARED = re.compile(r"nfs|cifs|smb|9p|afs|ceph|lustre|gpfs|beegfs|gluster|ocfs|gfs2|orangefs|pvfs|virtiofs|fuse")


class Database:
    """Runs SQL on the file at `path`; each statement outside a transaction is synced to disk.

    `address` is an SQLite URI to open instead of `path`. A statement waits `patience_s`, with warnings, for another
    process that holds a lock on the file.

    Raises:
        Unavailable: STORAGE_FAILED: another process still holds a lock after `patience_s`.
        PreconditionFailed: STORAGE_FAILED: the file cannot be written or read.
        DataLoss: The file is damaged, or has other tables.
    """

    def __init__(self, path: Path, address: str = "", patience_s: float = math.inf):
        self._path, self.patience_s = path, patience_s
        with self._typed():
            self._connection = sqlite3.connect(
                address or path, isolation_level=None, uri=bool(address), timeout=_SLICE_S
            )

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction  # SQLite ends a transaction by itself after some failures

    def execute(self, sql: str, values: tuple[object, ...] = ()) -> list[SqlRow]:
        return self._retry_while_locked(lambda: self._connection.execute(sql, values).fetchall())

    def insert(self, sql: str, values: tuple[object, ...]) -> int:
        number = self._retry_while_locked(lambda: self._connection.execute(sql, values).lastrowid)
        assert number is not None
        return number

    def executemany(self, sql: str, rows: Sequence[tuple[object, ...]]) -> None:
        self._retry_while_locked(lambda: self._connection.executemany(sql, rows))

    async def free(self) -> None:
        """Waits until no other process holds a lock on the file, without blocking the event loop; warns meanwhile."""
        if self.in_transaction:
            return
        wait = _Wait(self._path)
        while not self._try_lock():
            wait.warn()
            await asyncio.sleep(_RETRY_S)
        wait.end()

    def add_function(self, name: str, function: Callable[..., float]) -> None:
        self._connection.create_function(name, -1, function, deterministic=True)

    def close(self) -> None:
        self._connection.close()

    def _try_lock(self) -> bool:
        with self._typed():
            self._connection.execute("PRAGMA busy_timeout=0").close()
            try:
                self._connection.execute("BEGIN EXCLUSIVE").close()
                self._connection.execute("ROLLBACK").close()
            except sqlite3.OperationalError as error:
                if _code(error) in _LOCKED:
                    return False
                raise
            finally:
                self._connection.execute(f"PRAGMA busy_timeout={int(_SLICE_S * 1e3)}").close()
        return True

    def _retry_while_locked(self, action: Callable[[], ResultT]) -> ResultT:
        wait = _Wait(self._path)
        with self._typed():
            while True:
                try:
                    result = action()
                except sqlite3.OperationalError as error:
                    if _code(error) not in _LOCKED or wait.waited_s() >= self.patience_s:
                        raise
                    wait.warn()
                else:
                    wait.end()
                    return result

    @contextmanager
    def _typed(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise _failure(self._path.absolute(), error) from error
        except UnicodeDecodeError as error:  # SQLite's message quotes bytes of the file
            raise damaged(self._path.absolute(), error) from error


_MOUNTS = Path("/proc/self/mounts")


def _mount(path: Path, mounts: Path) -> tuple[str, str]:
    try:
        lines = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return "", ""
    # Of mounts at one place, the last counts.
    places = {Path(place.encode().decode("unicode_escape")): (kind, options) for _, place, kind, options, *_ in lines}
    there = path.resolve()
    return next((places[at] for at in (there, *there.parents) if at in places), ("", ""))


def is_shared(path: Path, mounts: Path = _MOUNTS) -> bool:
    """Returns whether `path` is on a file system that other hosts may mount too, or that passes files on (FUSE)."""
    return _SHARED.search(_mount(path, mounts)[0]) is not None


def has_local_locks(path: Path, mounts: Path = _MOUNTS) -> bool:
    """Returns whether `path` is on NFS mounted so that other hosts do not see its locks (man 5 nfs)."""
    kind, options = _mount(path, mounts)
    return kind.startswith("nfs") and not _LOCAL_LOCKS.isdisjoint(options.split(","))


class _Wait:
    """Warns of a lock that another process holds: after a second, and then every minute."""

    def __init__(self, path: Path):
        self._path, self._began, self._next_s, self._has_warned = path, time.monotonic(), _FIRST_WARNING_S, False

    def waited_s(self) -> float:
        return time.monotonic() - self._began

    def warn(self) -> None:
        if (waited := self.waited_s()) < self._next_s:
            return
        self._next_s, self._has_warned = waited + _WARN_EVERY_S, True
        log.warning(
            "%s has been locked by %s for %.0f s; this waits until it is free, and then goes on",
            self._path,
            _lock_holders(self._path),
            waited,
        )

    def end(self) -> None:
        if self._has_warned:
            log.warning("%s is free again after %.0f s; going on", self._path, self.waited_s())


def _lock_holders(path: Path) -> str:
    """Returns who holds the lock on the database at `path`, as far as the kernel says so."""
    files = set[int]()
    for name in (path, path.with_name(f"{path.name}-shm")):
        with suppress(OSError):
            files.add(name.stat().st_ino)
    holders: dict[bool, list[int]] = {True: [], False: []}  # by whether the lock excludes all others
    with suppress(OSError, ValueError):
        for line in Path("/proc/locks").read_text().splitlines():
            _, *waits, _, _, kind, pid, place, _, _ = line.split()
            if not waits and int(place.rpartition(":")[2]) in files:
                holders[kind == "WRITE"].append(int(pid))
    pids = sorted({*(holders[True] or holders[False])} - {os.getpid()})
    return ", ".join(f"process {pid} ({_command(pid)})" for pid in pids if pid > 0) or "another process"


def _command(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "ended"
    return " ".join(command.split())[:80]


def damaged(what: object, why: object, fix: str = "restore it from a backup, or use another name") -> DataLoss:
    """Returns the error of a part of a run's record, such as a file, whose content is not what was written."""
    return DataLoss(f"{what} is damaged: {why}; {fix}")


@contextmanager
def reading(what: str, fix: str = "restore it from a backup") -> Iterator[None]:
    """Turns errors of code that reads `what`, a part of a run's record, into those of `damaged`."""
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise damaged(what, f"{field}: {first['msg']}" if field else first["msg"], fix) from error
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise damaged(what, f"{type(error).__name__}: {error}", fix) from error


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # without the extended part


def _is_full(path: Path) -> bool:
    with suppress(OSError):
        return shutil.disk_usage(path.parent).free < _LEAST_FREE_BYTES
    return False


def _failure(path: Path, error: sqlite3.Error) -> LockstepError:
    code = _code(error)
    if code in _LOCKED:
        message = (
            f"{path} is locked by {_lock_holders(path)}: {error}; end that process, then run the same command again"
        )
        return errors.Unavailable(message, reason=Reason.STORAGE_FAILED, path=str(path))
    if code in _FIXES:
        if code == sqlite3.SQLITE_IOERR and _is_full(path):  # what SQLite says if it cannot make its index
            code = sqlite3.SQLITE_FULL
        message = f"{path} cannot be written: {error}; {_FIXES[code]}, then run the same command again"
        return errors.PreconditionFailed(message, reason=Reason.STORAGE_FAILED, path=str(path))
    if code == sqlite3.SQLITE_NOMEM:
        return errors.Overloaded(f"{path}: {error}; free memory of this host", reason=Reason.OUT_OF_MEMORY)
    if isinstance(error, sqlite3.InterfaceError | sqlite3.ProgrammingError):
        return errors.InternalError(f"{path}: {error}")
    return damaged(path, error)
