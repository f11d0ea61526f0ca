"""Measures how long a step spends in each phase."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from enum import StrEnum

from services.coordinator.runs.lanes import Busy, lane_metrics


class Phase(StrEnum):
    """Names the phases of the loop."""

    GENERATING = "generating"
    TRAINING = "training"
    PUBLISHING = "publishing"
    CHECKPOINTING = "checkpointing"
    EVALUATING = "evaluating"


class StepClock:
    """Adds up the seconds that a step spends in each phase. Phases may overlap."""

    def __init__(self) -> None:
        self.lanes = {"publish": Busy()}
        """Sides of the run that can be busy at the same time; clients add theirs."""
        self.restart()

    def restart(self) -> None:
        """Starts a new step."""
        self._seconds = dict.fromkeys(Phase, 0.0)
        self._num_active, self._busy_began, self._busy_s = 0, 0.0, 0.0
        self._ended = 0.0  # when the last phase ended
        self._step_began = time.perf_counter()

    @contextmanager
    def measure(self, phase: Phase) -> Iterator[None]:
        """Adds the time spent inside the block to `phase`."""
        begin = time.perf_counter()
        self._busy_began = self._busy_began if self._num_active else begin
        self._num_active += 1
        try:
            with self.lanes["publish"].working() if phase is Phase.PUBLISHING else nullcontext():
                yield
        finally:
            end = self._ended = time.perf_counter()
            self._seconds[phase] += end - begin
            self._num_active -= 1
            self._busy_s += 0.0 if self._num_active else end - self._busy_began

    def take(self, phase: Phase) -> float:
        """Returns the seconds spent in `phase`, which has just ended, and leaves them out of the step and its lanes."""
        seconds, self._seconds[phase] = self._seconds[phase], 0.0
        for busy in self.lanes.values():
            busy.leave_out(self._ended - seconds, self._ended)
        self._step_began += seconds
        self._busy_s -= seconds
        return seconds

    def metrics(self) -> dict[str, float]:
        """Returns `time/<phase>_s` of the phases that took time, the lanes, `time/step_s` and `time/outside_share`.

        `time/outside_share` is the fraction of the step that was spent outside of all phases.
        """
        now = time.perf_counter()
        step_s = now - self._step_began
        times = {f"time/{phase.value}_s": seconds for phase, seconds in self._seconds.items() if seconds}
        outside = 1 - self._busy_s / step_s
        times |= lane_metrics(self.lanes, self._step_began, now)
        return times | {"time/step_s": step_s, "time/outside_share": outside}
