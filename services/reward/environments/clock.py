"""Limits how long a call of an environment takes, without the time in which it waits for a place of ours."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar


class Clock:
    """Expires when it has run for `limit_s` seconds in total. It begins to run at once, and can be stopped."""

    def __init__(self, limit_s: float):
        self._loop = asyncio.get_running_loop()
        self.expired: asyncio.Future[None] = self._loop.create_future()
        self._left_s, self._num_stops = limit_s, 0
        self._run()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Does not count the time of the block, nor what else the call does in the meantime."""
        self._num_stops += 1
        if self._num_stops == 1:
            self._timer.cancel()
            self._left_s -= time.monotonic() - self._began
        try:
            yield
        finally:
            self._num_stops -= 1
            if not self._num_stops:
                self._run()

    def close(self) -> None:
        """Cancels the timer."""
        self._num_stops += 1  # whoever stopped it may still start it again
        self._timer.cancel()

    def _run(self) -> None:
        self._began = time.monotonic()
        self._timer = self._loop.call_later(self._left_s, self._expire)

    def _expire(self) -> None:
        if not self.expired.done():
            self.expired.set_result(None)


CLOCK: ContextVar[Clock] = ContextVar("clock")
"""The clock of the call that the current task is a part of."""


@contextmanager
def off_the_clock() -> Iterator[None]:
    """Does not count the time of the block for `turn_s`. What is in it must have a limit of its own.

    That of the episode (`episode_s`) holds in any case. Outside an episode there is no clock, and nothing to stop.
    """
    clock = CLOCK.get(None)
    with clock.stopped() if clock else nullcontext():
        yield
