"""Lets a service answer only the coordinator that opened a run on it last, by a fencing token in every call.

The coordinator makes a token for each run that it works on and sends it in the header HEADER of every call. `OpenRun`
makes the caller's token the only one that the service accepts, and the token before it is never accepted again.

With LEASE_HEADER it also says for how many seconds a service keeps the run open without a call of this coordinator.
"""

import asyncio
import functools
import logging
import math
import os
import uuid
from collections.abc import Awaitable, Callable, Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar

from services.common.errors import InvalidInput, PreconditionFailed, Reason
from services.common.telemetry import scoped

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


HEADER = "lockstep-fencing-token"
LEASE_HEADER = "lockstep-lease-s"

# The token and the lease in seconds, as their headers have them.
_own: ContextVar[tuple[str, str] | None] = ContextVar("lockstep_fencing_token", default=None)
_of_caller: ContextVar[tuple[str, str]] = ContextVar("lockstep_fencing_token_of_caller", default=("", "0"))


@contextmanager
def new_token(lease_s: float = 0.0) -> Generator[None]:
    """Gives the calls of the block, and of tasks created in it, a new token. Other calls have the process's token.

    A service closes a run that was opened in the block after `lease_s` seconds without a call; never, if it is 0.
    """
    with scoped(_own, (uuid.uuid4().hex, str(lease_s))):
        yield


def outgoing() -> tuple[tuple[str, str], ...]:
    """Returns the gRPC metadata that sends the token and the lease with a call."""
    token, lease = _own.get() or (_token_of_process(os.getpid()), "0")
    return ((HEADER, token), (LEASE_HEADER, lease))


@functools.cache
def _token_of_process(pid: int) -> str:
    return uuid.uuid4().hex  # by pid, because a fork is another process


@contextmanager
def incoming(metadata: Iterable[tuple[str, str | bytes]]) -> Generator[None]:
    """Gives the work in the block the token and the lease that a caller sent in `metadata`."""
    sent = dict(metadata)
    with scoped(_of_caller, (str(sent.get(HEADER, "")), str(sent.get(LEASE_HEADER, "0")))):
        yield


async def _keep_open() -> None: ...


class Fence:
    """Knows the token of the coordinator that opened a run on this service last, and those of all before it.

    `close` closes the run, if its lease has ended.
    """

    def __init__(self, close: Callable[[], Awaitable[None]] = _keep_open) -> None:
        self._token = ""
        self._runs: dict[str, str] = {}  # the run id of every token that was accepted
        self.lease = Lease(close)

    @property
    def is_open(self) -> bool:
        """Whether the caller's token is accepted."""
        return self._token in ("", _of_caller.get()[0])

    @property
    def knows_caller(self) -> bool:
        """Whether the caller has opened a run on this service, now or before."""
        return _of_caller.get()[0] in self._runs

    def take_over(self, run_id: str) -> None:
        """Accepts only the caller's token from now on, and begins the caller's lease.

        Raises:
            InvalidInput: The caller has sent no token, or a lease that is no number of seconds.
            PreconditionFailed: RUN_REPLACED, the caller was replaced before.
        """
        token, lease = _of_caller.get()
        if not token:
            raise InvalidInput(f"{HEADER}: required; send the same random string with every call", field=HEADER)
        # A token that was replaced never comes back; that of the open run may open it again.
        if token in self._runs:
            self.require()
        lease_s = _parsed_lease(lease)
        if self._token not in ("", token):
            line = "run %s is opened; the coordinator that opened run %s before is refused from now on"
            log.info(line, run_id, self._runs[self._token])
        self._token, self._runs[token] = token, run_id
        self.lease.begin(lease_s)

    def renew_lease(self) -> None:
        """Renews the lease if the caller is the coordinator that opened the run."""
        if self._token and self.is_open:
            self.lease.renew()

    @contextmanager
    def guarding(self) -> Generator[None]:
        """Checks the caller's token before the block and after it: an error may be the result of being replaced."""
        self.require()
        try:
            yield
        except Exception:
            self.require()
            raise
        self.require()

    def require(self) -> None:
        """Checks the caller's token, if a run was opened, and renews the lease."""
        if self.is_open:
            self.renew_lease()
            return
        now, before = self._runs[self._token], self._runs.get(_of_caller.get()[0], "")
        if now == before:
            message = f"another coordinator has opened run {now} on this service and goes on with it; this one ends"
        elif before:
            message = (
                f"run {now} was opened on this service and has replaced run {before}: give each run its own services, "
                "then start the earlier run again; it resumes"
            )
        else:
            message = f"run {now} is open on this service, and the caller is not the coordinator that opened it"
        raise PreconditionFailed(message, reason=Reason.RUN_REPLACED, run=now)


def _parsed_lease(text: str) -> float:
    try:
        lease_s = float(text)
    except ValueError:
        lease_s = math.nan
    if not 0 <= lease_s < math.inf:
        raise InvalidInput(f"{LEASE_HEADER}: must be a number of seconds, 0 or more", field=LEASE_HEADER)
    return lease_s
