"""Reads a run's ledger and metrics.jsonl, also while the run goes on, without creating or changing files."""

import fcntl
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from services.common.errors import DataLoss, LockstepError, NotFound
from services.common.files import storage_error
from services.coordinator.runs.database import Database, damaged, reading
from services.coordinator.runs.ledger import LEDGER, METRICS_FIELDS, Decision, Kind, Ledger, checked_row

METRICS = "metrics.jsonl"
# How long a command waits for a process that keeps others from reading.
_PATIENCE_S = 10.0
_MOST_SECONDS = 253_402_300_800.0  # the year 10000, which no date has
# Of larger numbers, not all are floats.
_MOST_STEPS = 1 << 53


@dataclass(frozen=True)
class LedgerRow:
    seq: int  # counts rows from 1
    time_s: float  # seconds since 1970
    kind: str  # a `Kind`, or one of a newer release
    version: int | None
    body: Decision

    @property
    def required_version(self) -> int:
        if self.version is None:
            raise damaged(f"row {self.seq} of the ledger, {self.kind},", "it has no version")
        return self.version


class LedgerReader(Ledger):
    """Reads the ledger of a run, which another process may still be writing.

    While another process writes it, SQLite stores read marks in its shared-memory file; nothing else changes.

    Raises:
        NotFound: `run_dir` holds no run.
        PreconditionFailed: STORAGE_FAILED: this user may not read the file.
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
            has_table = self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'decisions'")
            if not has_table or not self.num_rows():  # its coordinator was killed before it had opened the run
                raise DataLoss(f"{path}: the ledger is empty; the run was never opened")
        except LockstepError:
            self.close()
            raise

    def rows(self, after: int = 0) -> list[LedgerRow]:
        """Returns the rows behind row `after`, oldest first."""
        sql = "SELECT seq, time, kind, version, body FROM decisions WHERE seq > ? ORDER BY seq"
        rows = self._db.execute(sql, (after,))
        return [
            LedgerRow(seq, self._seconds(seq, time_s), kind, version, checked_row(self._path, seq, kind, version, body))
            for seq, time_s, kind, version, body in rows
        ]

    def opening_of(self, step: int) -> Decision:
        """Returns the opening of the session that finished `step`, which must be finished."""
        opened = self._opening_before("MAX(seq)", "kind = ?2 AND version = ?3", Kind.FINISHED.value, step)
        assert opened, "a session that has finished a step was opened"
        return opened

    def opening_that_began(self) -> Decision | None:
        """Returns the opening of the last session that began, which wrote config.json; None if none did."""
        return self._opening_before("MAX(seq)", "kind = ?2", Kind.BEGUN.value)

    def opening_shown(self) -> Decision | None:
        """Returns the opening whose config the run has: of the last session that began, or the last one if none did."""
        return self.opening_that_began() or self.last(Kind.OPENED)

    def first_opening(self) -> Decision:
        """Returns the opening of the session that published the run's first weights; there must be one."""
        opened = self._opening_before("MIN(seq)", "kind = ?2", Kind.PUBLISHED.value)
        assert opened, "a session that has published weights was opened"
        return opened

    def times(self) -> list[tuple[float, str]]:
        """Returns (seconds since 1970, kind) of each decision, oldest first. A kind may be one of a newer release."""
        rows = self._db.execute("SELECT seq, time, kind FROM decisions ORDER BY seq")
        return [(self._seconds(seq, time_s), kind) for seq, time_s, kind in rows]

    def _seconds(self, seq: int, time_s: object) -> float:
        if not (isinstance(time_s, float) and 0 <= time_s < _MOST_SECONDS):
            raise damaged(f"{self._path}: row {seq} of the ledger", f"its time is {time_s!r}")
        return time_s

    def close(self) -> None:
        self._db.close()


def _mode(path: Path) -> str:
    """Returns how to open the ledger at `path`, so that reading it creates no file."""
    try:
        with path.open("rb") as file:
            uses_wal = file.read(20)[18:19] == b"\2"  # of SQLite's header
    except OSError as error:
        raise storage_error(path, error, done="read") from error
    journal, wal = (path.with_name(f"{path.name}-{kind}") for kind in ("journal", "wal"))
    if uses_wal and not wal.exists():
        return "ro&immutable=1"  # without a write-ahead log, SQLite would create one; an existing one has to be read
    is_cut = not uses_wal and journal.exists() and journal.stat().st_size
    return "rw" if is_cut else "ro"  # what a killed process left half written has to be taken back first


def is_running(run_dir: Path) -> bool:
    path = (run_dir / LEDGER).with_suffix(".lock")
    if not path.is_file():
        return False
    with path.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@dataclass(frozen=True)
class MetricsLine:
    """A whole line of metrics.jsonl: the numbers of a step, or of an evaluation after it."""

    text: str
    step: int
    metrics: dict[str, float]

    @property
    def is_step(self) -> bool:
        return "time/step_s" in self.metrics

    @property
    def place(self) -> tuple[int, bool]:
        """Returns what orders the lines of a run: an evaluation comes after the step."""
        return self.step, not self.is_step


def metrics_lines(
    path: Path, damaged_lines: list[int] | None = None, num_bytes: int | None = None
) -> Iterator[MetricsLine]:
    """Yields the lines of the metrics.jsonl at `path`, or of its first bytes; none if there is no file.

    A last line without an end is left out: it is still being written, or its writer was killed. The numbers of damaged
    lines, as a full disk may leave them, are added to `damaged_lines`.

    Raises:
        DataLoss: A line is damaged, and `damaged_lines` is None.
    """
    for number, line in enumerate(path.read_bytes()[:num_bytes].split(b"\n")[:-1] if path.is_file() else (), 1):
        try:
            with reading(f"line {number} of {path}", "resuming the run takes it from the ledger"):
                metrics: dict[str, float] = json.loads(line.decode())
                step = METRICS_FIELDS.validate_python(metrics)["step"]  # the others stay as they are in the ledger
                if not (step.is_integer() and 0 <= step < _MOST_STEPS):
                    raise ValueError(f"its step is {step}")
                read = MetricsLine(line.decode(), int(metrics.pop("step")), metrics)
        except DataLoss:
            if damaged_lines is None:
                raise
            damaged_lines.append(number)
        else:
            yield read
