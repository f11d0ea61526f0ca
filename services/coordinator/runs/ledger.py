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
from typing import Any

from pydantic import BaseModel, ConfigDict, Json, TypeAdapter, create_model

from services.common.errors import LockstepError, PreconditionFailed, Reason
from services.common.files import writing
from services.common.json_values import JsonObject
from services.common.rpc.history import note_row
from services.coordinator.runs.database import Database, damaged, is_shared, reading

LEDGER = "ledger.sqlite"

Decision = JsonObject
"""A decision read from the ledger: its `version`, and the fields given to `Ledger.record`, as JSON values."""


class Kind(StrEnum):
    OPENED = "opened"  # run id, config and versions, each time a coordinator opens the run
    DATA = "data"  # digests of the training data and of the held-out sets, each time a coordinator begins the run
    BEGUN = "begun"  # newest finished step, each time a coordinator has opened the services
    EPOCH = "epoch"  # weight-group epoch and its number of replicas
    PUBLISHED = "published"  # stamp that the replicas serve
    SELECTED = "selected"  # which groups a step trains on, which were dropped or left over, and why
    COLLECTED = "collected"  # SHA-256 of a step's Parquet files, the stamp that its samples were generated from
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
    DELETED_BATCHES = "deleted_batches"  # of all versions before this one, to free space
    DELETED_EVALUATION = "deleted_evaluation"  # name of a file of samples, deleted to free space


def _fields(**types: Any) -> TypeAdapter[BaseModel]:
    """Returns the check of a decision's fields on which readers rely; later releases may add others."""
    return TypeAdapter(create_model("Decision", __config__=ConfigDict(strict=True, extra="allow"), **types))


METRICS_FIELDS = TypeAdapter(dict[str, float], config=ConfigDict(strict=True))
"""The check of the metrics of a step or an evaluation."""
_CHECKPOINT = _fields(path=str, manifest_digest=str)
_BODIES: Mapping[str, TypeAdapter[BaseModel] | TypeAdapter[dict[str, float]]] = {
    Kind.OPENED: _fields(run_id=str, config=Json[JsonObject], checkpoint=str, versions=(dict[str, str], {})),
    Kind.PUBLISHED: _fields(digest=str, received=(dict[str, str], {})),
    Kind.SELECTED: _fields(metrics=(dict[str, float], {})),
    Kind.COLLECTED: _fields(
        dataset=str,
        sha256=str,
        digest=str,
        calls_sha256=(str | None, None),
        drawn=(int | None, None),
        num_prompts=(int, 1),
        kl=(dict[str, float] | None, None),
    ),
    Kind.FINISHED: METRICS_FIELDS,
    Kind.EVAL_SAMPLES: _fields(file=str, sha256=str),
    Kind.EVALUATED: METRICS_FIELDS,
    Kind.STOPPED: _fields(metric=str, best_version=int, best_value=float),
    Kind.EXPORTED: _fields(path=str),
    Kind.SAVED: _CHECKPOINT,
    Kind.SAVED_CRITIC: _CHECKPOINT,
    Kind.FAILED: _fields(reason=str, message=str),
    Kind.DELETED: _fields(path=str),
    Kind.DELETED_BATCHES: _fields(),
    Kind.DELETED_EVALUATION: _fields(file=str),
}
_OF_SFT = _fields(dataset=str)
_WITHOUT_VERSION = {Kind.OPENED, Kind.EPOCH, Kind.DELETED, Kind.DELETED_EVALUATION, Kind.FAILED}
_OTHER = _fields()


def checked_row(path: Path, seq: int, kind: str, version: object, text: object) -> Decision:
    """Returns the body of a row of the ledger at `path`, which is the JSON `text`."""
    is_sft = kind == Kind.COLLECTED and version is None
    needs_version = kind in _BODIES.keys() - _WITHOUT_VERSION and not is_sft
    with reading(f"{path}: row {seq} of the ledger, {kind},"):
        if not (isinstance(version, int) and version >= 0) and (version is not None or needs_version):
            raise ValueError(f"its version is {version!r}")
        body = json.loads(text)  # type: ignore[arg-type]  # a damaged row may have another type
        (_OF_SFT if is_sft else _BODIES.get(kind, _OTHER)).validate_python(body)
        return body


_TABLES = (
    "CREATE TABLE decisions (seq INTEGER PRIMARY KEY, time REAL NOT NULL, kind TEXT NOT NULL, version INTEGER, "
    "body TEXT NOT NULL, crc INTEGER)",
    "CREATE INDEX by_kind ON decisions (kind, version)",
    "CREATE TABLE outcomes (step INTEGER, prompt_id TEXT, num_samples INTEGER NOT NULL, num_passed INTEGER NOT NULL, "
    "PRIMARY KEY (step, prompt_id)) WITHOUT ROWID",
)


def place_in(run_dir: Path, checkpoint: str) -> Path:
    """Returns where a run's directory has a checkpoint that the run recorded, perhaps when it was elsewhere."""
    return run_dir / Path(checkpoint).parent.name / Path(checkpoint).name


class Ledger:
    """An append-only list of decisions. A lock file lets only one coordinator have it open.

    Every method waits, with warnings, as long as another process holds a lock on the database. The loop first awaits
    `free`, so that the event loop goes on meanwhile.

    Raises:
        PreconditionFailed: Another coordinator has the run open; or STORAGE_FAILED, as of `Database`.
        DataLoss: The file is damaged.
    """

    _counts: tuple[int, Mapping[str, tuple[int, int]]] = 0, {}
    """Samples that passed and all samples, by prompt id, of all steps before the one that comes first."""

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
        # The write-ahead log has the newest decisions.
        files = (path, path.with_name(f"{path.name}-wal"))
        self._inodes = {file: file.stat().st_ino for file in files if file.exists()}

    def _make_tables(self) -> None:
        # A write-ahead log lets others read at any time, but its index is memory that only one host sees.
        ((mode,),) = self._db.execute(f"PRAGMA journal_mode={'TRUNCATE' if is_shared(self._path) else 'WAL'}")
        if mode not in ("wal", "truncate"):  # no shared memory here
            self._db.execute("PRAGMA journal_mode=TRUNCATE")
        self._db.execute("PRAGMA synchronous=FULL")
        for sql in _TABLES:
            self._db.execute(re.sub("TABLE|INDEX", r"\g<0> IF NOT EXISTS", sql, count=1))

    async def free(self) -> None:
        """Waits until no other process holds a lock on the file."""
        await self._db.free()

    def set_patience(self, seconds: float) -> None:
        """Makes later methods raise Unavailable if another process still holds a lock after `seconds`."""
        self._db.patience_s = seconds

    def record(self, kind: Kind, version: int | None = None, **body: object) -> int:
        """Appends a decision and syncs it to disk. Returns its sequence number."""
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
        return self._decisions(kind, "SELECT seq, version, body FROM decisions WHERE kind = ? ORDER BY seq")

    def last(self, kind: Kind, version: int | None = None) -> Decision | None:
        """Returns the newest decision of a kind, optionally only of one version; None if there is none."""
        # A condition that holds for every version would keep SQLite from using the index.
        values, where = ((), "") if version is None else ((version,), "AND version = ?2")
        sql = f"SELECT seq, version, body FROM decisions WHERE kind = ?1 {where} ORDER BY seq DESC LIMIT 1"
        return next(iter(self._decisions(kind, sql, *values)), None)

    def opening_that_worked(self) -> Decision | None:
        """Returns the newest opening that published weights, or finished a step, before another one; None if none did.

        No service had used the config of a later one.
        """
        return self._opening_before("MAX(seq)", "kind IN (?2, ?3)", Kind.PUBLISHED.value, Kind.FINISHED.value)

    def num_rows(self) -> int:
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
        return self._decisions(
            kind,
            "WITH deleted AS (SELECT json_extract(body, '$.path') AS path, MAX(seq) AS last_seq FROM decisions "
            "WHERE kind = ?2 GROUP BY path) SELECT seq, version, body FROM decisions "
            "LEFT JOIN deleted ON deleted.path = json_extract(body, '$.path') "
            "WHERE kind = ?1 AND seq > IFNULL(last_seq, 0) ORDER BY seq",
            Kind.DELETED.value,
        )

    def evaluations(self) -> list[Decision]:
        """Returns the evaluations, oldest first, each with its `version`, of what the run has trained up to now.

        If it went back to an older checkpoint, those of later steps do not count any more.
        """
        finished = self.last_finished()
        rows = self._decisions(
            Kind.EVALUATED,
            "SELECT seq, version, body FROM decisions AS evaluated WHERE kind = ? AND NOT EXISTS ("
            "SELECT 1 FROM decisions AS finished WHERE kind = ? AND finished.seq > evaluated.seq "
            "AND finished.version = evaluated.version) ORDER BY seq",
            Kind.FINISHED.value,
        )
        return [row for row in rows if finished is None or row["version"] <= finished]

    def place(self, saved: Decision) -> str:
        """Returns where a checkpoint is: in this run's directory, also if that was moved or copied since the save."""
        return str(place_in(self._path.parent, saved["path"]).absolute())

    def _decisions(self, kind: Kind, sql: str, *values: object) -> list[Decision]:
        rows = self._db.execute(sql, (kind.value, *values))
        return [
            {"version": version, **checked_row(self._path, seq, kind, version, body)} for seq, version, body in rows
        ]

    def _opening_before(self, which: str, where: str, *values: object) -> Decision | None:
        """Returns the newest opening before a decision: `which` of those `where` selects by `values`, from ?2 on."""
        before = f"SELECT {which} FROM decisions WHERE {where}"
        sql = f"SELECT seq, version, body FROM decisions WHERE kind = ?1 AND seq < ({before}) ORDER BY seq DESC LIMIT 1"
        return next(iter(self._decisions(Kind.OPENED, sql, *values)), None)

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
        problems = [f"row {seq} ({kind}) is not what was written" for seq, kind in self._db.execute(changed)]
        schema = {sql for (sql,) in self._db.execute("SELECT sql FROM sqlite_master")}
        problems += [f"it has no `{sql}`" for sql in _TABLES if sql not in schema]
        problems += [problem for (problem,) in self._db.execute("PRAGMA integrity_check(1)") if problem != "ok"]
        if problems:
            raise damaged(self._path.absolute(), problems[0])

    def _require_file(self) -> None:
        """Checks that the open files are still those at their paths: writes to a deleted file succeed and are lost."""
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
        if step < self._counts[0]:
            self._counts = 0, {}
        self._db.execute("DELETE FROM outcomes WHERE step = ?", (step,))
        rows = [(step, prompt_id, *counts) for prompt_id, counts in outcomes.items()]
        self._db.executemany("INSERT INTO outcomes VALUES (?, ?, ?, ?)", rows)

    def success_rates(self, step: int, window: int | None) -> dict[str, float]:
        """Returns the fraction of samples that passed, by prompt id, in the last `window` (or all) steps before `step`.

        Outcomes recorded for `step` or later, before a restart, do not count, so a resumed run gets the same rates.
        """
        kept = self._counts if self._counts[0] <= step else (0, {})
        first, before = kept if window is None else (step - window, {})
        rows = self._db.execute(
            "SELECT prompt_id, SUM(num_passed), SUM(num_samples) FROM outcomes WHERE step < ?1 AND step >= ?2 "
            "GROUP BY prompt_id",
            (step, first),
        )
        counts = dict(before)
        for prompt_id, num_passed, num_samples in rows:
            passed_before, samples_before = counts.get(prompt_id, (0, 0))
            counts[prompt_id] = passed_before + num_passed, samples_before + num_samples
        if window is None:
            self._counts = step, counts
        return {prompt_id: num_passed / num_samples for prompt_id, (num_passed, num_samples) in counts.items()}

    def close(self) -> None:
        self._db.close()
        self._lock.close()  # which releases it


def _crc(time_s: float, kind: str, version: int | None, body: str) -> int:
    return zlib.crc32(json.dumps([time_s, kind, version, body]).encode())
