"""Frees the resources of a run on a service if its coordinator is gone for good and could not close the run."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)


class Lease:
    """Calls `close` once no call of the coordinator has renewed it for the time that the coordinator asked for.

    `close` must ask `has_ended` when it holds the service's lock: a coordinator may have come in between.
    """

    def __init__(self, close: Callable[[], Awaitable[None]]):
        self._close = close
        self._lease_s = self._until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._closing: asyncio.Task[None] | None = None

    def has_ended(self, run_id: str) -> bool:
        """Returns whether run `run_id`, "" if none is open, must be closed, and logs why."""
        if not run_id or not self._is_over:
            return False
        log.warning("run %s: no call of its coordinator came for %g s, so it is closed", run_id, self._lease_s)
        return True

    @property
    def _is_over(self) -> bool:
        return bool(self._lease_s) and asyncio.get_running_loop().time() >= self._until

    def begin(self, lease_s: float) -> None:
        """Begins a lease of `lease_s` seconds in place of the one before; one of 0 seconds never ends."""
        self._lease_s = lease_s
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if lease_s:
            self.renew()
            self._wait()

    def renew(self) -> None:
        """Begins the same lease again."""
        if self._lease_s:
            self._until = asyncio.get_running_loop().time() + self._lease_s

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_at(self._until, self._check, self._until)

    def _check(self, due: float) -> None:
        late_s = asyncio.get_running_loop().time() - due
        if late_s > self._lease_s / 2:  # this process was stopped, and may not have read the calls that came meanwhile
            self.renew()
        if self._is_over:
            self._closing = asyncio.ensure_future(self._close())
        else:
            self._wait()
