"""Measures how long a step spends in each phase."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from enum import StrEnum

LANES = ("generate", "score", "train", "publish")


class Busy:
    """Notes the intervals in which at least one call is in progress."""

    def __init__(self) -> None:
        self._num_calls, self._began = 0, 0.0
        self._intervals: list[tuple[float, float]] = []

    @contextmanager
    def working(self) -> Iterator[None]:
        """Counts the block as a call."""
        if not self._num_calls:
            self._began = time.perf_counter()
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            if not self._num_calls:
                self._intervals.append((self._began, time.perf_counter()))

    def take(self, since: float, until: float) -> list[tuple[float, float]]:
        """Returns the intervals between two times, in seconds after the first, and forgets those before the second.

        A call in progress is cut at `until`.
        """
        found, self._intervals = self._intervals, []
        if self._num_calls:
            found.append((self._began, until))
            self._began = until
        return [(max(begin, since) - since, end - since) for begin, end in found if end > since]

    def leave_out(self, since: float, until: float) -> None:
        """Forgets the calls between two times, and moves those before the first to before the second."""
        moved = until - since
        before = [(begin, min(end, since)) for begin, end in self._intervals if begin < since]
        self._intervals = [(begin + moved, end + moved) for begin, end in before]


def lane_metrics(lanes: Mapping[str, Busy], since: float, until: float) -> dict[str, float]:
    """Returns `time/<name>_begin_s`, `_end_s` and `_busy_s` of every lane that was busy in the step.

    Begin and end are those of its first and last call, in seconds after the step began. Busy is the time in between in
    which there was at least one.
    """
    found: dict[str, float] = {}
    for name, busy in lanes.items():
        if intervals := busy.take(since, until):
            found[f"time/{name}_begin_s"], found[f"time/{name}_end_s"] = intervals[0][0], intervals[-1][1]
            found[f"time/{name}_busy_s"] = sum(end - begin for begin, end in intervals)
    return found


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
