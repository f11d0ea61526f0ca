"""Wraps a SQLite connection, with failures as typed errors that have the file's path."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from services.common.errors import DataLoss, LockstepError, PreconditionFailed, Reason

_FIXES = {
    sqlite3.SQLITE_FULL: "free space on that disk",
    sqlite3.SQLITE_READONLY: "make it writable for this user",
    sqlite3.SQLITE_CANTOPEN: "bring its directory back, or make it writable for this user",
}
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


class Database:
    """Runs SQL on the file at `path`; each statement outside a transaction is synced to disk.

    Raises:
        PreconditionFailed: STORAGE_FAILED: the file cannot be written or read.
        DataLoss: The file is damaged.
    """

    def __init__(self, path: Path, address: str = ""):
        """Opens `path`, or the SQLite URI `address` for it."""
        self._path = path
        with self._typed():
            self._connection = sqlite3.connect(address or path, isolation_level=None, uri=bool(address))

    @property
    def in_transaction(self) -> bool:
        """Returns whether a transaction is open. SQLite ends it by itself after some failures."""
        return self._connection.in_transaction

    def execute(self, sql: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        """Runs one statement."""
        with self._typed():
            return self._connection.execute(sql, values)

    def executemany(self, sql: str, rows: list[tuple[Any, ...]]) -> None:
        """Runs one statement for each row."""
        with self._typed():
            self._connection.executemany(sql, rows)

    def close(self) -> None:
        """Closes the file."""
        self._connection.close()

    @contextmanager
    def _typed(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            if (failure := _failure(self._path.absolute(), error)) is None:
                raise
            raise failure from error


def _failure(path: Path, error: sqlite3.DatabaseError) -> LockstepError | None:
    """Returns the typed error, or None if the statement itself is wrong."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # without the extended part
    if code in _DAMAGED:
        return DataLoss(f"{path} is damaged: {error}; restore it from a backup, or use another name")
    if code not in _FIXES and code not in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_PERM, sqlite3.SQLITE_NOLFS):
        return None
    fix = _FIXES.get(code, "check the disk")
    message = f"{path} cannot be written: {error}; {fix}, then run the same command again"
    return PreconditionFailed(message, reason=Reason.STORAGE_FAILED, path=str(path))
