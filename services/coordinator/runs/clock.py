"""Measures how long a step spends in each phase."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum


class Phase(StrEnum):
    """What the loop is doing."""

    GENERATING = "generating"
    TRAINING = "training"
    PUBLISHING = "publishing"
    CHECKPOINTING = "checkpointing"
    EVALUATING = "evaluating"


class StepClock:
    """Adds up the seconds that a step spends in each phase."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Starts a new step."""
        self._seconds = dict.fromkeys(Phase, 0.0)
        self._step_began = time.perf_counter()

    @contextmanager
    def measure(self, phase: Phase) -> Iterator[None]:
        """Adds the time spent inside the block to `phase`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] += time.perf_counter() - begin

    def take(self, phase: Phase) -> float:
        """Returns the seconds spent in `phase` and subtracts them from the step's time."""
        seconds, self._seconds[phase] = self._seconds[phase], 0.0
        self._step_began += seconds
        return seconds

    def metrics(self) -> dict[str, float]:
        """Returns `time/<phase>_s` of every phase that took any time, `time/step_s` and `time/outside_share`.

        `time/outside_share` is the fraction of the step that was spent outside of all phases.
        """
        step_s = time.perf_counter() - self._step_began
        times = {f"time/{phase.value}_s": seconds for phase, seconds in self._seconds.items() if seconds}
        outside = 1 - sum(self._seconds.values()) / step_s
        return times | {"time/step_s": step_s, "time/outside_share": outside}
