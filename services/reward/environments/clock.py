"""Limits how long a call of an environment may take, not counting the time that it waits for its turn."""

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
        """Stops the clock during the block, also for anything else that the call does meanwhile."""
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
        self._num_stops += 1  # a block that stopped the clock may still end
        self._timer.cancel()

    def _run(self) -> None:
        self._began = time.monotonic()
        self._timer = self._loop.call_later(self._left_s, self._expire)

    def _expire(self) -> None:
        if not self.expired.done():
            self.expired.set_result(None)


CLOCK: ContextVar[Clock] = ContextVar("clock")
"""Clock of the call that the current task belongs to."""


@contextmanager
def off_the_clock() -> Iterator[None]:
    """Does not count the time of the block toward `turn_s`. The block must have a time limit of its own.

    The episode's limit (`episode_s`) applies in any case. Outside of an episode this does nothing.
    """
    clock = CLOCK.get(None)
    with clock.stopped() if clock else nullcontext():
        yield
