"""Reads a run's state and events from its directory, whichever process ran it."""

import json
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from lockstep.coordinator.v1 import coordinator_pb2 as pb

from services.common.errors import LockstepError, described
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
