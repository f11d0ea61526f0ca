"""The interface of everything that follows a run: terminal, files, Prometheus, trackers and the daemon."""

import logging
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from lockstep.coordinator.v1 import coordinator_pb2 as pb

log = logging.getLogger(__name__)


class ReplicaCounts(Protocol):
    """The numbers about rollout replicas that reporters show."""

    num_redispatched: int

    @property
    def num_dead(self) -> int: ...  # that were lost and have not come back


class Ending(StrEnum):
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


class Reporter:
    """Is notified of every phase, step and evaluation. Each method does nothing by default."""

    shows_samples = False
    """Whether `conversation` shows anything, so that it is worth reading a sample from the disk."""

    def watch(self, rollout: ReplicaCounts) -> None:
        """Gives the reporter access to the run's replicas, which are about to be opened."""

    def stage(self, service: str, name: str, began_s: float, seconds: float | None = None) -> None:
        """Reports that a service does something, such as loading weights, since `began_s` (of `time.monotonic`).

        It has ended if `seconds` says how long it took.
        """

    def begin_phase(self, name: str, version: int) -> None:
        """Reports that a phase of the step after `version` begins."""

    def end_phase(self, name: str, seconds: float) -> None:
        """Reports how long a phase took that has ended, also by an error."""

    def step(self, version: int, metrics: dict[str, float]) -> None:
        """Reports a finished step; `version` counts steps from 1."""

    def conversation(self, version: int, conversation: pb.Conversation) -> None:
        """Shows one sample of the step `version`, which is reported next."""

    def evaluation(self, version: int, metrics: dict[str, float]) -> None:
        """Reports an evaluation of the weights of `version`: `eval/<set>/<metric>` and `time/evaluating_s`."""

    def note_ending(self, ending: Ending) -> None:
        """Reports how the run ended, just before `close`."""

    def close(self) -> None:
        """Is called once, at the end of the run."""


class Reporters:
    """Tells every one of `reporters` what happens. Each kind of failure of one is logged once; none ends the run.

    The ledger has everything that a reporter did not write.
    """

    def __init__(self, reporters: Sequence[Reporter] = ()):
        self._reporters, self._logged = list(reporters), set[tuple[Reporter, type[Exception]]]()

    def add(self, reporters: Sequence[Reporter]) -> None:
        self._reporters += reporters

    def tell(self, report: Callable[[Reporter], object]) -> None:
        for reporter in self._reporters:
            try:
                report(reporter)
            except Exception as error:  # noqa: BLE001 what shows a run must not end it
                name, kind = type(reporter).__name__, type(error)
                if (reporter, kind) not in self._logged:
                    message = "%s misses what it should show: %s: %s; the run goes on"
                    log.warning(message, name, kind.__name__, error)
                self._logged.add((reporter, kind))


def in_order(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the held-out metrics in display order: by set, with its reward first, then by name."""

    def place(name: str) -> tuple[str, bool, str]:
        held_out, _, metric = name.rpartition("/")
        return held_out, metric != "reward", metric

    return {name: metrics[name] for name in sorted(metrics, key=place) if name.startswith("eval/")}
