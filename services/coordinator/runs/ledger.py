"""Records every decision of a run, with hashes of its inputs, in a SQLite file that is synced to disk."""

import fcntl
import json
import re
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, TypeAdapter

from services.common.errors import LockstepError, PreconditionFailed, Reason
from services.common.files.storage import writing
from services.common.rpc.history import note_row
from services.coordinator.runs.database import Database, damaged, is_shared, reading

LEDGER = "ledger.sqlite"
"""Name of the file in a run's directory."""

Decision = dict[str, Any]
"""A decision read from the ledger: its `version`, and the fields given to `Ledger.record`, as JSON values."""


class Kind(StrEnum):
    """What a decision is about."""

    OPENED = "opened"  # run id, config and versions, each time a coordinator opens the run
    DATA = "data"  # digests of the training data and of the held-out sets, each time a coordinator begins the run
    BEGUN = "begun"  # newest finished step, each time a coordinator has opened the services
    EPOCH = "epoch"  # weight-group epoch and its number of replicas
    PUBLISHED = "published"  # stamp that the replicas serve
    SELECTED = "selected"  # which groups a step trains on, which were dropped or left over, and why
    COLLECTED = "collected"  # SHA-256 of a step's Parquet file, the stamp that its samples were generated from
    FINISHED = "finished"  # metrics of a step
    EVAL_SAMPLES = "eval_samples"  # name and SHA-256 of the Parquet file of a held-out set, before its metrics
    SCORED = "scored"  # names and versions of the scorers and environment of the evaluation that is recorded next
    EVALUATED = "evaluated"  # metrics of an evaluation
    STOPPED = "stopped"  # early stopping ended the run here: metric, value, and the step and value of the best
    EXPORTED = "exported"  # path of the final policy
    SAVED = "saved"  # checkpoint path and manifest digest
    SAVED_CRITIC = "saved_critic"  # the same for the critic, recorded before the policy's
    FAILED = "failed"  # the error that ended a session: reason and message
    DELETED = "deleted"  # path of a checkpoint that no longer belongs to the run


def _is_object(text: str) -> str:
    if not isinstance(json.loads(text), dict):
        raise ValueError("not a JSON object")
    return text


class _Body(BaseModel):
    """The fields of a decision that readers rely on; later releases may add others."""

    model_config = ConfigDict(strict=True, extra="allow")


class _Opened(_Body):
    run_id: str
    config: Annotated[str, AfterValidator(_is_object)]
    checkpoint: str
    versions: dict[str, str] = {}


class _Published(_Body):
    digest: str
    received: dict[str, str] = {}


class _Selected(_Body):
    metrics: dict[str, float] = {}


class _OfData(_Body):
    dataset: str


class _Collected(_OfData):
    sha256: str
    digest: str
    drawn: int | None = None
    num_prompts: int = 1
    kl: dict[str, float] | None = None


class _EvalSamples(_Body):
    file: str
    sha256: str


class _Saved(_Body):
    path: str
    manifest_digest: str


class _OfPath(_Body):
    path: str


class _Failed(_Body):
    reason: str
    message: str


class _Stopped(_Body):
    metric: str
    best_version: int
    best_value: float


_METRICS = TypeAdapter(dict[str, float])
_BODIES: Mapping[str, TypeAdapter[_Body] | TypeAdapter[dict[str, float]]] = {
    Kind.OPENED: TypeAdapter(_Opened),
    Kind.PUBLISHED: TypeAdapter(_Published),
    Kind.SELECTED: TypeAdapter(_Selected),
    Kind.COLLECTED: TypeAdapter(_Collected),
    Kind.FINISHED: _METRICS,
    Kind.EVAL_SAMPLES: TypeAdapter(_EvalSamples),
    Kind.EVALUATED: _METRICS,
    Kind.STOPPED: TypeAdapter(_Stopped),
    Kind.EXPORTED: TypeAdapter(_OfPath),
    Kind.SAVED: TypeAdapter(_Saved),
    Kind.SAVED_CRITIC: TypeAdapter(_Saved),
    Kind.FAILED: TypeAdapter(_Failed),
    Kind.DELETED: TypeAdapter(_OfPath),
}
_OF_SFT = TypeAdapter(_OfData)
_WITHOUT_VERSION = {Kind.OPENED, Kind.EPOCH, Kind.DELETED, Kind.FAILED}
_ANY = TypeAdapter(_Body)


def checked_row(path: Path, seq: int, kind: str, version: object, text: object) -> Decision:
    """Returns the body of a row of the ledger at `path`, which is the JSON `text`.

    Raises:
        DataLoss: It is no JSON object, lacks a field or has one of another type, or its version is missing.
    """
    is_sft = kind == Kind.COLLECTED and version is None
    needs_version = kind in _BODIES.keys() - _WITHOUT_VERSION and not is_sft
    with reading(f"{path}: row {seq} of the ledger, {kind},"):
        if not isinstance(version, int) and (version is not None or needs_version):
            raise ValueError(f"its version is {version!r}")
        body = json.loads(text)  # type: ignore[arg-type]  # a damaged row may have another type
        (_OF_SFT if is_sft else _BODIES.get(kind, _ANY)).validate_python(body)
        return body


_TABLES = (
    "CREATE TABLE decisions (seq INTEGER PRIMARY KEY, time REAL NOT NULL, kind TEXT NOT NULL, version INTEGER, "
    "body TEXT NOT NULL, crc INTEGER)",
    "CREATE INDEX by_kind ON decisions (kind, version)",
    "CREATE TABLE outcomes (step INTEGER, prompt_id TEXT, num_samples INTEGER NOT NULL, num_passed INTEGER NOT NULL, "
    "PRIMARY KEY (step, prompt_id)) WITHOUT ROWID",
)


class Ledger:
    """An append-only list of decisions. A lock file lets only one coordinator have it open.

    Every method waits, with warnings, as long as another process holds a lock on the database. The loop first awaits
    `free`, so that the event loop goes on meanwhile.

    Raises:
        PreconditionFailed: Another coordinator has the run open; or STORAGE_FAILED, as of `Database`.
        DataLoss: The file is damaged.
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
            self._require_intact()
        except LockstepError:
            self.close()
            raise
        self._inodes = {file: file.stat().st_ino for file in self._files()}

    def _make_tables(self) -> None:
        # A write-ahead log lets others read at any time, but its index is memory that only one host sees.
        ((mode,),) = self._db.execute(f"PRAGMA journal_mode={'TRUNCATE' if is_shared(self._path) else 'WAL'}")
        if mode not in ("wal", "truncate"):  # no shared memory here
            self._db.execute("PRAGMA journal_mode=TRUNCATE")
        self._db.execute("PRAGMA synchronous=FULL")
        for sql in _TABLES:
            self._db.execute(re.sub("TABLE|INDEX", r"\g<0> IF NOT EXISTS", sql, count=1))

    async def free(self) -> None:
        """Waits until no other process holds a lock on the database. Warns meanwhile, and says which process it is."""
        await self._db.free()

    def set_patience(self, seconds: float) -> None:
        """Makes later methods raise Unavailable if another process still holds a lock after `seconds`."""
        self._db.patience_s = seconds

    def record(self, kind: Kind, version: int | None = None, **body: object) -> int:
        """Appends a decision and syncs it to disk. Returns its sequence number.

        Raises:
            PreconditionFailed: STORAGE_FAILED: the disk is full or read-only, or the file was deleted.
        """
        self._require_file()
        row = (time.time(), kind.value, version, json.dumps(body))
        sql = "INSERT INTO decisions (time, kind, version, body, crc) VALUES (?, ?, ?, ?, ?)"
        number = self._db.insert(sql, (*row, _crc(*row)))
        if self._db.in_transaction:
            self._in_transaction.append((number, kind, version))
        else:
            note_row(number, kind, version)
        return number

    def all(self, kind: Kind) -> list[Decision]:
        """Returns all decisions of a kind, oldest first, each with its `version`."""
        rows = self._db.execute("SELECT seq, version, body FROM decisions WHERE kind = ? ORDER BY seq", (kind.value,))
        return [self._decision(kind, *row) for row in rows]

    def last(self, kind: Kind, version: int | None = None) -> Decision | None:
        """Returns the newest decision of a kind, optionally only of one version; None if there is none."""
        rows = self._db.execute(
            "SELECT seq, version, body FROM decisions WHERE kind = ?1 AND (?2 IS NULL OR version = ?2) "
            "ORDER BY seq DESC LIMIT 1",
            (kind.value, version),
        )
        return self._decision(kind, *rows[0]) if rows else None

    def num_rows(self) -> int:
        """Returns the sequence number of the newest decision; 0 if there is none."""
        return self._db.execute("SELECT IFNULL(MAX(seq), 0) FROM decisions")[0][0]

    def last_finished(self) -> int | None:
        """Returns the newest finished step of the history that the services hold; None if no coordinator began."""
        rows = self._db.execute(
            "SELECT version FROM decisions WHERE kind IN (?, ?) ORDER BY seq DESC LIMIT 1",
            (Kind.BEGUN.value, Kind.FINISHED.value),
        )
        return rows[0][0] if rows else None

    def is_newer(self, kind: Kind, than: Kind, version: int | None = None) -> bool:
        """Returns whether there is a decision of `kind` that is newer than every decision of kind `than`.

        With `version`, only decisions of this version count.
        """
        newest = "SELECT IFNULL(MAX(seq), 0) FROM decisions WHERE (?3 IS NULL OR version = ?3) AND kind ="
        rows = self._db.execute(f"SELECT ({newest} ?1) > ({newest} ?2)", (kind.value, than.value, version))
        return bool(rows[0][0])

    def failure(self) -> Decision | None:
        """Returns the error that ended the last session; None if none did."""
        return self.last(Kind.FAILED) if self.is_newer(Kind.FAILED, Kind.OPENED) else None

    def checkpoints(self, kind: Kind) -> list[Decision]:
        """Returns the saves of a kind, oldest first, each with its `version`, whose `path` was not deleted since."""
        rows = self._db.execute(
            "SELECT seq, version, body FROM decisions AS saved WHERE kind = ? AND NOT EXISTS ("
            "SELECT 1 FROM decisions AS deleted WHERE kind = ? AND deleted.seq > saved.seq "
            "AND json_extract(deleted.body, '$.path') = json_extract(saved.body, '$.path')) ORDER BY seq",
            (kind.value, Kind.DELETED.value),
        )
        return [self._decision(kind, *row) for row in rows]

    def _decision(self, kind: Kind, seq: int, version: int | None, body: str) -> Decision:
        return {"version": version, **checked_row(self._path, seq, kind, version, body)}

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Makes the writes inside the block atomic: either all are kept or none."""
        self._db.execute("BEGIN EXCLUSIVE")  # waits for other processes here, and not at the end
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

    def _require_intact(self) -> None:
        """Raises DataLoss if the file's structure is broken, or a row is not what was written."""
        self._db.add_function("row_crc", _crc)
        changed = "SELECT seq, kind FROM decisions WHERE crc IS NOT row_crc(time, kind, version, body) LIMIT 1"
        found = [f"row {seq} ({kind}) is not what was written" for seq, kind in self._db.execute(changed)]
        schema = {sql for (sql,) in self._db.execute("SELECT sql FROM sqlite_master")}
        found += [f"it has no `{sql}`" for sql in _TABLES if sql not in schema]
        found += [what for (what,) in self._db.execute("PRAGMA integrity_check(1)") if what != "ok"]
        if found:
            raise damaged(self._path.absolute(), found[0])

    def _files(self) -> list[Path]:
        """Returns the database's files that hold decisions: the write-ahead log has the newest."""
        return [file for file in (self._path, self._path.with_name(f"{self._path.name}-wal")) if file.exists()]

    def _require_file(self) -> None:
        """Checks that the open files are still those at their paths: writes to a deleted file succeed and are lost.

        Raises:
            PreconditionFailed: STORAGE_FAILED: one is gone, or another file has taken its place.
        """
        for file, inode in self._inodes.items():
            with writing(file), suppress(FileNotFoundError):
                if file.stat().st_ino == inode:
                    continue
            raise PreconditionFailed(
                f"{file.absolute()} cannot be written: it is gone, deleted or replaced while this run had it open; "
                f"bring the directory back as it was, with {self._path.name} and {self._path.name}-wal, then run the "
                "same command again",
                reason=Reason.STORAGE_FAILED,
                path=str(file.absolute()),
            )

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
        self._db.close()
        self._lock.close()


def _crc(time_s: float, kind: str, version: int | None, body: str) -> int:
    return zlib.crc32(json.dumps([time_s, kind, version, body]).encode())
