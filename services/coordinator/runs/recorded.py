"""Reads a run's directory without keeping a lock and without creating or changing files."""

import fcntl
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from services.common.errors import DataLoss, LockstepError, NotFound
from services.coordinator.runs.database import Database, checked_row
from services.coordinator.runs.ledger import Ledger
from services.coordinator.runs.resume import LEDGER

# How long a command waits for a process that keeps others from reading.
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Row:
    """Holds a decision as it is in the ledger."""

    seq: int
    """Counts rows from 1."""
    time_s: float
    """Seconds since 1970."""
    kind: str
    """A `Kind`, or one of a newer release."""
    version: int | None
    body: dict[str, Any]

    @property
    def required_version(self) -> int:
        """Returns the version of a kind that always has one.

        Raises:
            DataLoss: It has none.
        """
        if self.version is None:
            raise DataLoss(f"row {self.seq} of the ledger, {self.kind}, has no version: the file is damaged")
        return self.version


class RecordedLedger(Ledger):
    """Reads the ledger of a run, which another process may still be writing.

    While another process writes it, SQLite stores read marks in its shared-memory file; nothing else changes.

    Raises:
        NotFound: `run_dir` holds no run.
        Unavailable: STORAGE_FAILED: another process keeps the file from being read.
        DataLoss: The ledger is empty or damaged.
    """

    def __init__(self, run_dir: Path):
        path = run_dir / LEDGER
        if not path.is_file():
            raise NotFound(
                f"{run_dir} holds no run: there is no {LEDGER}; give the directory of a run", field="run_dir"
            )
        self._path = path
        self._db = Database(path, f"file:{quote(str(path.absolute()))}?mode={_mode(path)}", patience_s=_PATIENCE_S)
        try:
            self._require_rows()
        except LockstepError:
            self.close()
            raise

    def _require_rows(self) -> None:
        has_table = self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'decisions'")
        if not has_table or not self.num_rows():  # its coordinator was killed before it had opened the run
            raise DataLoss(f"{self._path}: the ledger is empty; the run was never opened")

    def rows(self) -> list[Row]:
        """Returns all decisions, oldest first.

        Raises:
            DataLoss: A row is damaged.
        """
        return [
            Row(seq, self._seconds(seq, time_s), kind, version, checked_row(self._path, seq, kind, version, body))
            for seq, time_s, kind, version, body in self._db.execute(
                "SELECT seq, time, kind, version, body FROM decisions ORDER BY seq"
            )
        ]

    def times(self) -> list[tuple[float, str]]:
        """Returns (seconds since 1970, kind) of each decision, oldest first. A kind may be one of a newer release."""
        rows = self._db.execute("SELECT seq, time, kind FROM decisions ORDER BY seq")
        return [(self._seconds(seq, time_s), kind) for seq, time_s, kind in rows]

    def _seconds(self, seq: int, time_s: object) -> float:
        if not isinstance(time_s, float):
            raise DataLoss(f"{self._path}: row {seq} of the ledger is damaged: its time is {time_s!r}")
        return time_s

    def close(self) -> None:
        """Closes the file."""
        self._db.close()


def _mode(path: Path) -> str:
    """Returns how to open the ledger at `path`, so that reading it creates no file."""
    with path.open("rb") as file:
        uses_wal = file.read(20)[18:19] == b"\2"  # of SQLite's header
    journal, wal = (path.with_name(f"{path.name}-{kind}") for kind in ("journal", "wal"))
    if uses_wal and not wal.exists():
        return "ro&immutable=1"  # without a write-ahead log, SQLite would create one; an existing one has to be read
    is_cut = not uses_wal and journal.exists() and journal.stat().st_size
    return "rw" if is_cut else "ro"  # what a killed process left half written has to be taken back first


def is_running(run_dir: Path) -> bool:
    """Returns whether a coordinator has the run open."""
    path = (run_dir / LEDGER).with_suffix(".lock")
    if not path.is_file():
        return False
    with path.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
