"""Every decision of a run with the hashes of its inputs, in the order they were made: SQLite, synced to disk."""

import fcntl
import json
import sqlite3
import time
from enum import StrEnum
from pathlib import Path
from typing import Any

from services.common.errors import PreconditionFailed


class Kind(StrEnum):
    """What was decided."""

    OPENED = "opened"  # run id and config, each time a coordinator opens the run
    EPOCH = "epoch"  # weight-group epoch and its number of replicas
    PUBLISHED = "published"  # stamp that is served
    COLLECTED = "collected"  # Parquet file of a step, its SHA-256, the stamp that its samples were drawn from
    FINISHED = "finished"  # metrics of a step
    EVALUATED = "evaluated"  # metrics of an evaluation
    SAVED = "saved"  # checkpoint path and manifest digest
    DELETED = "deleted"  # checkpoint path


class Ledger:
    """Append-only. One coordinator at a time: a lock file is held while it is open.

    Raises:
        PreconditionFailed: Another coordinator has the run open.
    """

    def __init__(self, path: Path):
        self._lock = path.with_suffix(".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise PreconditionFailed(
                f"{path.parent} is open in another coordinator; end that, or use another name"
            ) from error
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS decisions "
            "(seq INTEGER PRIMARY KEY, time REAL NOT NULL, kind TEXT NOT NULL, version INTEGER, body TEXT NOT NULL)"
        )
        self._db.execute("CREATE INDEX IF NOT EXISTS by_kind ON decisions (kind, version)")

    def record(self, kind: Kind, version: int | None = None, **body: Any) -> int:
        """Appends a decision and waits for the disk; its sequence number."""
        row = (time.time(), kind.value, version, json.dumps(body))
        cursor = self._db.execute("INSERT INTO decisions (time, kind, version, body) VALUES (?, ?, ?, ?)", row)
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def all(self, kind: Kind) -> list[dict[str, Any]]:
        """Decisions of a kind, oldest first, each with its `version`."""
        rows = self._db.execute("SELECT version, body FROM decisions WHERE kind = ? ORDER BY seq", (kind.value,))
        return [{"version": version, **json.loads(body)} for version, body in rows]

    def last(self, kind: Kind, version: int | None = None) -> dict[str, Any] | None:
        """The newest decision of a kind, of a version if one is given."""
        row = self._db.execute(
            "SELECT version, body FROM decisions WHERE kind = ?1 AND (?2 IS NULL OR version = ?2) "
            "ORDER BY seq DESC LIMIT 1",
            (kind.value, version),
        ).fetchone()
        return {"version": row[0], **json.loads(row[1])} if row else None

    def close(self) -> None:
        """Closes the file and lets another coordinator open it."""
        self._db.close()
        self._lock.close()
