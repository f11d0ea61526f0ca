"""The interface of everything that watches a run: terminal, files, Prometheus, trackers, the daemon."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class ReplicaCounts(Protocol):
    """The state of the rollout replicas, as far as reporters show it."""

    num_redispatched: int

    @property
    def num_dead(self) -> int:
        """Replicas that are gone and have not come back."""
        ...


class Reporter:
    """Is told of every phase, step and evaluation. Each method does nothing by default."""

    def watch(self, rollout: ReplicaCounts) -> None:
        """Gives access to the run's replicas, which are about to be opened."""

    def phase(self, name: str, version: int) -> AbstractContextManager[None]:
        """Returns a context that the run stays in for as long as the phase lasts."""
        return nullcontext()

    def step(self, version: int, metrics: dict[str, float]) -> None:
        """Reports a finished step; `version` counts steps from 1."""

    def evaluation(self, version: int, metrics: dict[str, float]) -> None:
        """Reports an evaluation of the weights of `version`: `eval/<set>/<metric>` and `time/evaluating_s`."""

    def close(self) -> None:
        """Ends the report. The run is over."""


def in_order(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the held-out metrics in the order in which they are shown: by set, its reward first, then by name."""

    def place(name: str) -> tuple[str, bool, str]:
        held_out, _, metric = name.rpartition("/")
        return held_out, metric != "reward", metric

    return {name: metrics[name] for name in sorted(metrics, key=place) if name.startswith("eval/")}
