"""Measures when each side of a run is busy in a step: generating, scoring, training and publishing."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

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
