"""Records every decision of a run, with hashes of its inputs, in a SQLite file that is synced to disk."""

import errno
import fcntl
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

from services.common.errors import LockstepError, PreconditionFailed
from services.common.files.storage import writing
from services.common.rpc.history.calls import note_row
from services.coordinator.runs.database import Database

Decision = dict[str, Any]
"""A decision read from the ledger: its `version`, and the fields given to `Ledger.record`, as JSON values."""


class Kind(StrEnum):
    """Names the kind of a decision."""

    OPENED = "opened"  # run id, config and versions, each time a coordinator opens the run
    DATA = "data"  # digests of the training data and of the held-out sets, each time a coordinator begins the run
    BEGUN = "begun"  # newest finished step, each time a coordinator has opened the services
    EPOCH = "epoch"  # weight-group epoch and its number of replicas
    PUBLISHED = "published"  # stamp that the replicas serve
    SELECTED = "selected"  # which groups a step trains on, which were dropped or left over, and why
    COLLECTED = "collected"  # SHA-256 of a step's Parquet file, the stamp that its samples were generated from
    FINISHED = "finished"  # metrics of a step
    EVALUATED = "evaluated"  # metrics of an evaluation
    STOPPED = "stopped"  # early stopping ended the run here: metric, value, and the step and value of the best
    EXPORTED = "exported"  # path of the final policy
    SAVED = "saved"  # checkpoint path and manifest digest
    SAVED_CRITIC = "saved_critic"  # the same for the critic, recorded before the policy's
    FAILED = "failed"  # the error that ended a session: reason and message
    DELETED = "deleted"  # path of a checkpoint that no longer belongs to the run


class Ledger:
    """Holds an append-only list of decisions. A lock file lets only one coordinator have it open.

    Raises:
        PreconditionFailed: Another coordinator has the run open.
    """

    def __init__(self, path: Path):
        self._path = path
        self._in_transaction: list[tuple[int, Kind, int | None]] = []
        with writing(path):
            self._lock = path.with_suffix(".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise PreconditionFailed(
                f"{path.parent} is open in another coordinator; stop it, or use another name"
            ) from error
        self._db = Database(path)
        try:
            self._make_tables()
        except LockstepError:
            self.close()
            raise
        self._inode = path.stat().st_ino

    def _make_tables(self) -> None:
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS decisions "
            "(seq INTEGER PRIMARY KEY, time REAL NOT NULL, kind TEXT NOT NULL, version INTEGER, body TEXT NOT NULL)"
        )
        self._db.execute("CREATE INDEX IF NOT EXISTS by_kind ON decisions (kind, version)")
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS outcomes (step INTEGER, prompt_id TEXT, num_samples INTEGER NOT NULL, "
            "num_passed INTEGER NOT NULL, PRIMARY KEY (step, prompt_id)) WITHOUT ROWID"
        )

    def record(self, kind: Kind, version: int | None = None, **body: object) -> int:
        """Appends a decision and syncs it to disk. Returns its sequence number.

        Raises:
            PreconditionFailed: STORAGE_FAILED: the disk is full or read-only, or the file was deleted.
        """
        self._require_file()
        row = (time.time(), kind.value, version, json.dumps(body))
        cursor = self._db.execute("INSERT INTO decisions (time, kind, version, body) VALUES (?, ?, ?, ?)", row)
        number = cursor.lastrowid
        assert number is not None
        if self._db.in_transaction:
            self._in_transaction.append((number, kind, version))
        else:
            note_row(number, kind, version)
        return number

    def all(self, kind: Kind) -> list[Decision]:
        """Returns all decisions of a kind, oldest first, each with its `version`."""
        rows = self._db.execute("SELECT version, body FROM decisions WHERE kind = ? ORDER BY seq", (kind.value,))
        return [{"version": version, **json.loads(body)} for version, body in rows]

    def last(self, kind: Kind, version: int | None = None) -> Decision | None:
        """Returns the newest decision of a kind, optionally only of one version; None if there is none."""
        row = self._db.execute(
            "SELECT version, body FROM decisions WHERE kind = ?1 AND (?2 IS NULL OR version = ?2) "
            "ORDER BY seq DESC LIMIT 1",
            (kind.value, version),
        ).fetchone()
        return {"version": row[0], **json.loads(row[1])} if row else None

    def num_rows(self) -> int:
        """Returns the sequence number of the newest decision; 0 if there is none."""
        return self._db.execute("SELECT IFNULL(MAX(seq), 0) FROM decisions").fetchone()[0]

    def last_finished(self) -> int | None:
        """Returns the newest finished step of the history that the services hold; None if no coordinator began."""
        row = self._db.execute(
            "SELECT version FROM decisions WHERE kind IN (?, ?) ORDER BY seq DESC LIMIT 1",
            (Kind.BEGUN.value, Kind.FINISHED.value),
        ).fetchone()
        return row[0] if row else None

    def is_newer(self, kind: Kind, than: Kind, version: int | None = None) -> bool:
        """Returns whether there is a decision of `kind` that is newer than every decision of kind `than`.

        With `version`, only decisions of this version count.
        """
        newest = "SELECT IFNULL(MAX(seq), 0) FROM decisions WHERE (?3 IS NULL OR version = ?3) AND kind ="
        row = self._db.execute(f"SELECT ({newest} ?1) > ({newest} ?2)", (kind.value, than.value, version)).fetchone()
        return bool(row[0])

    def failure(self) -> Decision | None:
        """Returns the error that ended the last session; None if none did."""
        return self.last(Kind.FAILED) if self.is_newer(Kind.FAILED, Kind.OPENED) else None

    def checkpoints(self, kind: Kind) -> list[Decision]:
        """Returns the saves of a kind, oldest first, each with its `version`, whose `path` was not deleted since."""
        rows = self._db.execute(
            "SELECT version, body FROM decisions AS saved WHERE kind = ? AND NOT EXISTS ("
            "SELECT 1 FROM decisions AS deleted WHERE kind = ? AND deleted.seq > saved.seq "
            "AND json_extract(deleted.body, '$.path') = json_extract(saved.body, '$.path')) ORDER BY seq",
            (kind.value, Kind.DELETED.value),
        )
        return [{"version": version, **json.loads(body)} for version, body in rows]

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Makes the writes inside the block atomic: either all are kept or none."""
        self._db.execute("BEGIN")
        try:
            yield
            self._db.execute("COMMIT")
            for row in self._in_transaction:
                note_row(*row)
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        finally:
            self._in_transaction = []

    def _require_file(self) -> None:
        """Checks that the open file is still the one at its path: writes to a deleted file succeed and are lost."""
        with writing(self._path):
            if self._path.stat().st_ino != self._inode:
                raise OSError(errno.ESTALE, "another file has taken its place", str(self._path))

    def keep_outcomes(self, step: int, outcomes: Mapping[str, tuple[int, int]]) -> None:
        """Stores (samples, samples that passed) by prompt id and replaces what `step` had before a restart."""
        self._db.execute("DELETE FROM outcomes WHERE step = ?", (step,))
        rows = [(step, prompt_id, *counts) for prompt_id, counts in outcomes.items()]
        self._db.executemany("INSERT INTO outcomes VALUES (?, ?, ?, ?)", rows)

    def success_rates(self, step: int, window: int | None) -> dict[str, float]:
        """Returns the fraction of samples that passed, by prompt id, in the last `window` (or all) steps before `step`.

        Outcomes recorded for `step` or later, before a restart, do not count, so a resumed run gets the same rates.
        """
        rows = self._db.execute(
            "SELECT prompt_id, SUM(num_passed), SUM(num_samples) FROM outcomes WHERE step < ?1 AND step >= ?2 "
            "GROUP BY prompt_id",
            (step, 0 if window is None else step - window),
        )
        return {prompt_id: num_passed / num_samples for prompt_id, num_passed, num_samples in rows}

    def close(self) -> None:
        """Closes the file and releases its lock."""
        self._db.close()
        self._lock.close()
