"""Defines the interface for everything that follows a run: terminal, files, Prometheus, trackers and the daemon."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from services.coordinator.data.conversation import Conversation

log = logging.getLogger(__name__)


class ReplicaCounts(Protocol):
    """Describes the numbers about rollout replicas that reporters show."""

    num_redispatched: int

    @property
    def num_dead(self) -> int:
        """Returns the number of replicas that were lost and have not come back."""
        ...


class Reporter:
    """Is notified of every phase, step and evaluation. Each method does nothing by default."""

    shows_samples = False
    """Whether `conversation` shows anything, so that it is worth reading a sample from the disk."""

    def watch(self, rollout: ReplicaCounts) -> None:
        """Gives the reporter access to the run's replicas, which are about to be opened."""

    def phase(self, name: str, version: int) -> AbstractContextManager[None]:
        """Returns a context manager that the run stays in during the phase."""
        return nullcontext()

    def step(self, version: int, metrics: dict[str, float]) -> None:
        """Reports a finished step; `version` counts steps from 1."""

    def conversation(self, version: int, conversation: Conversation) -> None:
        """Shows one sample of the step `version`, which is reported next."""

    def evaluation(self, version: int, metrics: dict[str, float]) -> None:
        """Reports an evaluation of the weights of `version`: `eval/<set>/<metric>` and `time/evaluating_s`."""

    def close(self) -> None:
        """Releases the reporter's resources at the end of the run."""


class Tolerant(Reporter):
    """Passes everything on to `reporter`. A disk or a terminal that fails it is logged once and does not end the run.

    The ledger has everything that a reporter of a file did not write.
    """

    def __init__(self, reporter: Reporter):
        self._reporter, self._has_failed = reporter, False

    def watch(self, rollout: ReplicaCounts) -> None:
        self._reporter.watch(rollout)

    def phase(self, name: str, version: int) -> AbstractContextManager[None]:
        return self._reporter.phase(name, version)

    def step(self, version: int, metrics: dict[str, float]) -> None:
        with self._tolerating():
            self._reporter.step(version, metrics)

    def evaluation(self, version: int, metrics: dict[str, float]) -> None:
        with self._tolerating():
            self._reporter.evaluation(version, metrics)

    def close(self) -> None:
        with self._tolerating():
            self._reporter.close()

    @contextmanager
    def _tolerating(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._has_failed:
                log.warning("%s misses steps: %s; the run goes on", type(self._reporter).__name__, error)
            self._has_failed = True


def in_order(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the held-out metrics in display order: by set, with its reward first, then by name."""

    def place(name: str) -> tuple[str, bool, str]:
        held_out, _, metric = name.rpartition("/")
        return held_out, metric != "reward", metric

    return {name: metrics[name] for name in sorted(metrics, key=place) if name.startswith("eval/")}
