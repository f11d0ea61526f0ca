"""Measures how long a step spends in each phase, as spans of a trace, and when each side of the run is busy in it."""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from enum import StrEnum

from services.common.telemetry import NO_TRACE, Span

LANES = ("generate", "score", "train", "publish")
"""Sides of a run that can be busy at the same time, in the order in which a step needs them."""


class Busy:
    """The intervals in which at least one piece of work, such as a call, is in progress."""

    def __init__(self) -> None:
        self._num_begun, self._began_s = 0, 0.0
        self._intervals: list[tuple[float, float]] = []

    @contextmanager
    def working(self) -> Iterator[None]:
        self.begin(time.perf_counter())
        try:
            yield
        finally:
            self.end(time.perf_counter())

    def begin(self, now_s: float) -> None:
        if not self._num_begun:
            self._began_s = now_s
        self._num_begun += 1

    def end(self, now_s: float) -> None:
        self._num_begun -= 1
        if not self._num_begun:
            self._intervals.append((self._began_s, now_s))

    def take(self, since: float, until: float) -> list[tuple[float, float]]:
        """Returns the intervals between two times, in seconds after the first, and forgets those before the second.

        Work in progress is cut at `until`.
        """
        intervals, self._intervals = self._intervals, []
        if self._num_begun:
            intervals.append((self._began_s, until))
            self._began_s = until
        return [(max(begin, since) - since, end - since) for begin, end in intervals if end > since]

    def leave_out(self, since: float, until: float) -> None:
        """Forgets the work between two times, and moves what was before the first to before the second."""
        moved = until - since
        before = [(begin, min(end, since)) for begin, end in self._intervals if begin < since]
        self._intervals = [(begin + moved, end + moved) for begin, end in before]


def lane_metrics(lanes: Mapping[str, Busy], since: float, until: float) -> dict[str, float]:
    """Returns `time/<name>_begin_s`, `_end_s` and `_busy_s` of every lane that was busy in the step.

    Begin and end are those of its first and last call, in seconds after the step began. Busy is the time in between in
    which there was at least one.
    """
    metrics: dict[str, float] = {}
    for name, busy in lanes.items():
        if intervals := busy.take(since, until):
            metrics |= {f"time/{name}_begin_s": intervals[0][0], f"time/{name}_end_s": intervals[-1][1]}
            metrics[f"time/{name}_busy_s"] = sum(end - begin for begin, end in intervals)
    return metrics


class Phase(StrEnum):
    GENERATING = "generating"
    TRAINING = "training"
    PUBLISHING = "publishing"
    CHECKPOINTING = "checkpointing"
    EVALUATING = "evaluating"


class StepClock:
    """Adds up the seconds that a step spends in each phase. Phases may overlap."""

    def __init__(self) -> None:
        self.trace = NO_TRACE
        """Has a span for each step, and in it one for each phase."""
        self.lanes = {"publish": Busy()}
        """Lanes of the run by name; clients add theirs."""
        self.opening: dict[str, float] = {}
        """Seconds that each stage of a service took until the first step of this session ended."""
        self._in_phases = Busy()
        self._step = ExitStack()  # in the span of the step, from its first phase on
        self._is_in_step = False
        self.restart()

    def restart(self) -> None:
        self.close()
        self._seconds = dict.fromkeys(Phase, 0.0)
        self._ended_s = 0.0  # when the last phase ended
        self._step_began_s = time.perf_counter()

    @contextmanager
    def measure(self, phase: Phase, version: int = 0) -> Iterator[Span]:
        """Adds the time of the block to `phase`; `version` is that of the weights when the step begins."""
        if not self._is_in_step:
            # A step begins with the checkpoint and the evaluation of its version, if there are any.
            self._step.enter_context(self.trace.span("step", version=version))
            self._is_in_step = True
        busy = [self._in_phases, *([self.lanes["publish"]] if phase is Phase.PUBLISHING else [])]
        with self.trace.span(phase.value, version=version) as span:
            for lane in busy:
                lane.begin(span.began_s)
            try:
                yield span
            finally:
                self._ended_s = span.end()
                self._seconds[phase] += span.seconds
                for lane in busy:
                    lane.end(self._ended_s)

    def take(self, phase: Phase) -> float:
        """Returns the seconds spent in `phase`, which has just ended, and leaves them out of the step and its lanes."""
        seconds, self._seconds[phase] = self._seconds[phase], 0.0
        for busy in (self._in_phases, *self.lanes.values()):
            busy.leave_out(self._ended_s - seconds, self._ended_s)
        self._step_began_s += seconds
        return seconds

    def metrics(self) -> dict[str, float]:
        """Returns `time/<phase>_s` of the phases that took time, the lanes, `time/step_s` and `time/outside_share`.

        `time/outside_share` is the fraction of the step that was spent outside of all phases. The first step also has
        `time/open_<stage>_s` of what the services did before it.
        """
        began_s, now_s = self._step_began_s, time.perf_counter()
        step_s = now_s - began_s
        times = {f"time/{phase.value}_s": seconds for phase, seconds in self._seconds.items() if seconds}
        in_phases_s = sum(end - begin for begin, end in self._in_phases.take(began_s, now_s))
        times |= lane_metrics(self.lanes, began_s, now_s)
        times |= {f"time/open_{stage}_s": seconds for stage, seconds in self.opening.items()}
        self.opening = {}
        return times | {"time/step_s": step_s, "time/outside_share": 1 - in_phases_s / step_s}

    def close(self) -> None:
        self._step.close()
        self._is_in_step = False
