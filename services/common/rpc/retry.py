"""Repeats calls that change nothing when they are repeated, if the connection to the service was lost."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from services.common.errors import LockstepError, Reason, Unavailable
from services.common.tasks import backoff_s

Answer = TypeVar("Answer")

log = logging.getLogger(__name__)

# Long enough for a reset connection or a link that fails for a moment, and short enough to report soon that a service
# has ended.
MAX_RETRY_S = 30.0


class Retries:
    """Decides when a call is made again, and when no more.

    Args:
        timeout_s: Limit of all attempts together.
        max_retry_s: Limit from the first lost connection on; with 0 there is one attempt.
    """

    def __init__(self, timeout_s: float, max_retry_s: float = MAX_RETRY_S):
        self._deadline, self._max_retry_s = time.monotonic() + timeout_s, max_retry_s
        self._until = self._deadline
        self._num_retries = 0

    @property
    def left_s(self) -> float:
        """Returns the timeout of the next attempt in seconds."""
        return max(0.0, self._deadline - time.monotonic())

    async def wait(self, error: LockstepError) -> bool:
        """Waits until the call can be made again, and returns whether it can; the pauses grow.

        It cannot if the service itself raised `error`, or if a limit would pass during the pause.
        """
        if error.reason is not Reason.UNREACHABLE:
            return False
        now, pause_s = time.monotonic(), backoff_s(self._num_retries)
        if self._num_retries == 0:
            self._until = min(self._deadline, now + self._max_retry_s)
        if now + pause_s >= self._until:
            return False
        self._num_retries += 1
        log.warning("calling again in %.1f s: %s", pause_s, error.message)
        await asyncio.sleep(pause_s)
        return True


async def repeated(
    call: Callable[[float], Awaitable[Answer]], *, timeout_s: float, max_retry_s: float = MAX_RETRY_S
) -> Answer:
    """Returns the answer of `call`, which takes its timeout in seconds and is made again after a lost connection. This
    is for answers that are streams.

    A call with one answer is repeated by `Client.call` itself.

    Raises:
        LockstepError: The error of the last call.
    """
    retries = Retries(timeout_s, max_retry_s)
    while True:
        try:
            return await call(retries.left_s)
        except Unavailable as error:
            if not await retries.wait(error):
                raise
