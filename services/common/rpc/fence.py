"""Lets a service answer only the coordinator that opened a run on it last, by a fencing token in every call.

The coordinator makes a token for each run that it works on and sends it in the header HEADER of every call. `OpenRun`
makes the caller's token the only one that the service accepts, and the token before it is never accepted again.
"""

import uuid
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar

from services.common.errors import InvalidInput, PreconditionFailed, Reason
from services.common.telemetry.context import scoped

HEADER = "lockstep-fencing-token"

_own: ContextVar[str] = ContextVar("lockstep_fencing_token", default=uuid.uuid4().hex)
_of_caller: ContextVar[str] = ContextVar("lockstep_fencing_token_of_caller", default="")


@contextmanager
def new_token() -> Generator[None]:
    """Gives the calls of the block, and of tasks created in it, a new token. Other calls have the process's token."""
    with scoped(_own, uuid.uuid4().hex):
        yield


def outgoing() -> tuple[tuple[str, str], ...]:
    """Returns the gRPC metadata that sends the token with a call."""
    return ((HEADER, _own.get()),)


@contextmanager
def incoming(metadata: Iterable[tuple[str, str | bytes]]) -> Generator[None]:
    """Gives the work in the block the token that a caller sent in `metadata`."""
    with scoped(_of_caller, str(dict(metadata).get(HEADER, ""))):
        yield


class Fence:
    """Knows the token of the coordinator that opened a run on this service last, and those of all before it."""

    def __init__(self) -> None:
        self._token = ""
        self._runs: dict[str, str] = {}  # the run id of every token that was the last one once

    @property
    def is_open(self) -> bool:
        """Whether the caller's token is accepted."""
        return self._token in ("", _of_caller.get())

    def take_over(self, run_id: str) -> None:
        """Accepts only the caller's token from now on.

        Raises:
            InvalidInput: The caller has sent no token.
            PreconditionFailed: RUN_REPLACED, the caller was replaced before.
        """
        token = _of_caller.get()
        if not token:
            raise InvalidInput(f"{HEADER}: required; send the same random string with every call", field=HEADER)
        if token in self._runs:
            self.require()
        self._token, self._runs[token] = token, run_id

    @contextmanager
    def guarding(self) -> Generator[None]:
        """Checks the caller's token before the block and after it: an error may be the result of being replaced.

        Raises:
            PreconditionFailed: As in `require`.
        """
        self.require()
        try:
            yield
        except Exception:
            self.require()
            raise
        self.require()

    def require(self) -> None:
        """Checks the caller's token, if a run was opened.

        Raises:
            PreconditionFailed: RUN_REPLACED, another coordinator has opened a run here since, or the token is missing.
        """
        if self.is_open:
            return
        now, before = self._runs[self._token], self._runs.get(_of_caller.get(), "")
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
