"""Runs a tracker in a thread of its own, so that neither its errors nor its waiting reach the run."""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

from services.coordinator.runs.reporter import Ending, Reporter

log = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 120.0
# Reports that wait for a slow tracker; further ones are left out.
_MAX_WAITING = 10_000
# Pauses before a call that failed is repeated. The libraries repeat their own requests for minutes.
_RETRIES_S = (1.0, 5.0)

_Job = tuple[str, str, Callable[[Reporter], object]]
"""Kind of the report, what it is, and the call."""


class Threaded(Reporter):
    """Passes reports on to the tracker that `make` returns.

    A report that fails is repeated, then left out; each kind of failure is logged once. At the end of the run it waits
    for the tracker, at most `close_timeout_s`.

    Raises:
        TimeoutError: The tracker does not start within OPEN_TIMEOUT_S.
        Exception: Whatever `make` raises.
    """

    def __init__(self, name: str, make: Callable[[], Reporter], close_timeout_s: float):
        self._name, self._make, self._close_timeout_s = name, make, close_timeout_s
        self._ending = Ending.FINISHED
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closing, self._num_lost, self._logged = threading.Event(), 0, set[tuple[str, str]]()
        opened: Future[None] = Future()
        # A daemon thread: the process does not wait for it at its end.
        self._thread = threading.Thread(target=self._send, args=(opened,), name=name, daemon=True)
        self._thread.start()
        try:
            opened.result(OPEN_TIMEOUT_S)
        except TimeoutError as error:
            raise TimeoutError(str(error) or f"no answer for {OPEN_TIMEOUT_S:g} s") from error

    def step(self, version: int, metrics: dict[str, float]) -> None:
        self._put("step", f"the metrics of step {version}", lambda tracker: tracker.step(version, metrics))

    def evaluation(self, version: int, metrics: dict[str, float]) -> None:
        what = f"the evaluation after step {version}"
        self._put("evaluation", what, lambda tracker: tracker.evaluation(version, metrics))

    def note_ending(self, ending: Ending) -> None:
        self._ending = ending

    def close(self) -> None:
        def finish(tracker: Reporter) -> None:
            tracker.note_ending(self._ending)
            tracker.close()

        self._jobs.put(("end", "the end of the run", finish))
        self._jobs.put(None)
        self._closing.set()
        self._thread.join(self._close_timeout_s)
        if self._thread.is_alive():
            why = f"did not answer for {self._close_timeout_s:g} s"
            log.warning("%s %s; metrics.jsonl has the metrics that it is missing", self._name, why)
        elif self._num_lost > len(self._logged):
            log.warning("%s misses %d reports; metrics.jsonl has all metrics", self._name, self._num_lost)

    def _put(self, kind: str, what: str, call: Callable[[Reporter], object]) -> None:
        if self._jobs.qsize() < _MAX_WAITING:
            self._jobs.put((kind, what, call))
        else:
            self._lose("queue", what, TimeoutError(f"{_MAX_WAITING} reports wait for it already"))

    def _send(self, opened: Future[None]) -> None:
        try:
            tracker = self._make()
        except BaseException as error:  # noqa: BLE001 the caller raises it
            opened.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            return
        opened.set_result(None)
        while job := self._jobs.get():
            self._try(tracker, *job)

    def _try(self, tracker: Reporter, kind: str, what: str, call: Callable[[Reporter], object]) -> None:
        for pause_s in (*_RETRIES_S, None):
            try:
                call(tracker)
            except BaseException as error:  # noqa: BLE001 its library may raise anything, SystemExit too
                if pause_s is None:
                    self._lose(kind, what, error)
                else:
                    self._closing.wait(pause_s)
            else:
                return

    def _lose(self, kind: str, what: str, error: BaseException) -> None:
        self._num_lost += 1
        if (seen := (kind, type(error).__name__)) in self._logged:
            return
        self._logged.add(seen)
        log.warning(
            "%s did not accept %s (metrics.jsonl has all metrics; the run goes on): %s: %s",
            self._name,
            what,
            seen[1],
            error,
        )
