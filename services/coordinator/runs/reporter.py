"""Interface for everything that follows a run: terminal, files, Prometheus, trackers and the daemon."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class ReplicaCounts(Protocol):
    """The numbers about rollout replicas that reporters show."""

    num_redispatched: int

    @property
    def num_dead(self) -> int:
        """Number of replicas that were lost and have not come back."""
        ...


class Reporter:
    """Is notified of every phase, step and evaluation. Each method does nothing by default."""

    def watch(self, rollout: ReplicaCounts) -> None:
        """Gives the reporter access to the run's replicas, which are about to be opened."""

    def phase(self, name: str, version: int) -> AbstractContextManager[None]:
        """Returns a context manager that the run stays in during the phase."""
        return nullcontext()

    def step(self, version: int, metrics: dict[str, float]) -> None:
        """Reports a finished step; `version` counts steps from 1."""

    def evaluation(self, version: int, metrics: dict[str, float]) -> None:
        """Reports an evaluation of the weights of `version`: `eval/<set>/<metric>` and `time/evaluating_s`."""

    def close(self) -> None:
        """Releases the reporter's resources at the end of the run."""


def in_order(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the held-out metrics in display order: by set, with its reward first, then by name."""

    def place(name: str) -> tuple[str, bool, str]:
        held_out, _, metric = name.rpartition("/")
        return held_out, metric != "reward", metric

    return {name: metrics[name] for name in sorted(metrics, key=place) if name.startswith("eval/")}
