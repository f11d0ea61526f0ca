"""Reads a run's state, events and logs from its directory, whichever process ran it, and sends records to its log."""

import asyncio
import json
import logging
import os
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, closing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from asyncinotify import Inotify, Mask
from lockstep.coordinator.v1 import coordinator_pb2 as pb

from services.common.config.run import Config
from services.common.errors import LockstepError, NotFound, Overloaded, described
from services.coordinator.observe.frontend import log_file
from services.coordinator.runs.database import reading
from services.coordinator.runs.ledger import LEDGER, Kind
from services.coordinator.runs.reader import METRICS, LedgerReader, metrics_lines


def read_run(directory: Path) -> pb.Run | None:
    """Returns the RL run in `directory`, as finished or stopped; None if there is none or it is an SFT run."""
    run = pb.Run(name=directory.name, run_dir=str(directory))
    try:
        if not (directory / LEDGER).is_file():
            return None
    except PermissionError:
        run.state, run.error = pb.RUN_STATE_FAILED, "its directory can be read by another user only"
        return run
    try:
        run.version = _newest_step(directory / METRICS)
        with closing(LedgerReader(directory)) as ledger:
            opened, failure = ledger.opening_shown(), ledger.failure()
            is_early = ledger.last(Kind.STOPPED, run.version) is not None  # early stopping ended the session
        if opened is None or "reward" not in (config := json.loads(opened["config"])):
            return None
        with reading(f"{directory}: the run's id or num_steps in the ledger"):
            run.run_id, run.num_steps = opened["run_id"], run.version if is_early else config["num_steps"]
    except LockstepError as error:
        run.state, run.error = pb.RUN_STATE_FAILED, f"{described(error)[0]}: cannot read the run's files: {error}"
        return run
    run.state = pb.RUN_STATE_FINISHED if run.version >= run.num_steps else pb.RUN_STATE_STOPPED
    if failure:
        run.state, run.error = pb.RUN_STATE_FAILED, f"{failure['reason']}: {failure['message']}"
    return run


def _newest_step(path: Path) -> int:
    if not path.is_file():
        return 0
    written = path.stat()
    return _read_newest_step(path, written.st_mtime_ns, written.st_size)


@lru_cache(maxsize=4096)  # long files take seconds, and a list of runs reads all
def _read_newest_step(path: Path, _mtime_ns: int, _num_bytes: int) -> int:
    return max((line.step for line in metrics_lines(path)), default=0)


def state_name(run: pb.Run) -> str:
    return pb.RunState.Name(run.state).removeprefix("RUN_STATE_").lower()


@dataclass(frozen=True)
class Event:
    """A finished step or an evaluation."""

    version: int
    is_step: bool
    encoded: bytes
    """A WatchRunResponse without the run's state; as a message it would take five times the memory."""

    def is_news(self, after: int) -> bool:
        """Returns whether it is new to a watcher that has seen everything up to step `after`."""
        # The evaluation of a step follows it, so the watcher may not have it; that of step 0 comes before all steps.
        return self.version > after if self.is_step else self.version >= after

    def with_state(self, run: pb.Run) -> pb.WatchRunResponse:
        """Returns the message for a watcher."""
        answer = pb.WatchRunResponse.FromString(self.encoded)
        answer.run.CopyFrom(run)
        return answer


def read_events(directory: Path, up_to: int | None = None) -> list[Event]:
    """Returns finished steps and evaluations, oldest first, up to version `up_to` if given.

    Raises:
        DataLoss: A line of metrics.jsonl is damaged.
    """
    return [
        event_of(line.step, line.metrics, is_step=line.is_step)
        for line in metrics_lines(directory / METRICS)
        if up_to is None or line.step <= up_to
    ]


def event_of(version: int, metrics: dict[str, float], *, is_step: bool) -> Event:
    """Returns the event of a finished step or an evaluation."""
    numbers = pb.Numbers(version=version, values=metrics)
    answer = pb.WatchRunResponse(step=numbers) if is_step else pb.WatchRunResponse(evaluation=numbers)
    return Event(version, is_step, answer.SerializeToString())


_CHUNK_BYTES = 256 << 10


async def read_log(
    directory: Path, service: str, offset: int, until: asyncio.Event | None
) -> AsyncGenerator[pb.ReadLogResponse, None]:
    """Yields the log of `service` from byte `offset`, or from its end if it is shorter.

    With `until`, also yields what is written before that event is set.

    Raises:
        NotFound: `directory` has no log of `service`.
        Overloaded: This user has no inotify watches left.
    """
    path = _find(directory, service)
    with ExitStack() as stack:
        file = stack.enter_context(path.open("rb"))
        file.seek(min(offset, os.fstat(file.fileno()).st_size))  # files have no offset of 2^63 and above
        written = _WriteWatcher(path, until, stack) if until is not None else None
        while True:
            is_last = written is not None and written.is_done
            while data := file.read(_CHUNK_BYTES):
                yield pb.ReadLogResponse(data=data, next_offset=file.tell())
            if written is None or is_last:
                return
            await written.more()


class _WriteWatcher:
    """Waits until a file may have more to read, which counts all that was written since this object was created."""

    def __init__(self, path: Path, until: asyncio.Event, stack: ExitStack):
        try:
            self._inotify = stack.enter_context(Inotify())
            self._inotify.add_watch(path, Mask.MODIFY)
        except OSError as error:
            raise Overloaded(
                f"cannot follow more logs on this host ({error}); stop another `lockstep logs --follow`"
            ) from error
        self._until = until
        self._over = asyncio.create_task(until.wait())
        stack.callback(self._over.cancel)

    @property
    def is_done(self) -> bool:
        return self._until.is_set()

    async def more(self) -> None:
        event = asyncio.create_task(self._inotify.get())
        try:
            await asyncio.wait([event, self._over], return_when=asyncio.FIRST_COMPLETED)
            if event.done():
                event.result()  # raises what reading from inotify did
        finally:
            event.cancel()
            await asyncio.wait([event])  # it uses the inotify handle, which is about to be closed


def _find(directory: Path, service: str) -> Path:
    """Returns the log of `service`, a regular file in `directory`. `service` is only compared with the names of
    existing files and never becomes part of a path.
    """
    logs = {path.stem: path for path in directory.glob("*.log") if path.is_file() and not path.is_symlink()}
    if service not in logs:
        there = ", ".join(sorted(logs)) or "none yet"
        raise NotFound(f"service: this run has no log of {service}; it has {there}", field="service")
    return logs[service]


_log: ContextVar[logging.Handler | None] = ContextVar("log of the run", default=None)


class ToRunLog(logging.Handler):
    """Passes a record to the log of the run whose task emitted it."""

    def emit(self, record: logging.LogRecord) -> None:
        if handler := _log.get():
            handler.handle(record)


def split_by_run() -> None:
    """Sends each run's records to its log; the process's own log keeps only their warnings and errors.

    Call it once, after logging is configured.
    """
    root = logging.getLogger()
    for handler in root.handlers:
        handler.addFilter(lambda record: _log.get() is None or record.levelno >= logging.WARNING)
    root.addHandler(ToRunLog())


@contextmanager
def logging_to(config: Config) -> Iterator[None]:
    """Sends the records of this task, and of the tasks that it starts in the block, to the log of this run."""
    handler = log_file(config)
    token = _log.set(handler)
    try:
        yield
    finally:
        _log.reset(token)
        handler.close()
