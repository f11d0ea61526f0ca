"""Repeats calls that change nothing when they are repeated, if the connection to the service was lost."""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from services.common.errors import Reason, Unavailable
from services.common.tasks import backoff_s

Answer = TypeVar("Answer")

log = logging.getLogger(__name__)

# Longer than a reset connection or a link that fails for a moment; a service that has ended is reported soon.
_MAX_RETRY_S = 30.0


async def repeated(
    call: Callable[[float], Awaitable[Answer]], *, timeout_s: float, max_retry_s: float = _MAX_RETRY_S
) -> Answer:
    """Returns the answer of `call`, whose argument is its timeout in seconds.

    After a lost connection it is called again, with growing pauses, until `max_retry_s` after the first loss or
    `timeout_s` after the start. An error that the service itself raised is never retried.

    Raises:
        LockstepError: The error of the last call.
    """
    deadline = time.monotonic() + timeout_s
    until = deadline
    for num_retries in itertools.count():
        began = time.monotonic()
        try:
            return await call(deadline - began)
        except Unavailable as error:
            if error.reason is not Reason.UNREACHABLE:
                raise
            pause_s, now = backoff_s(num_retries), time.monotonic()
            if num_retries == 0:
                until = min(deadline, now + max_retry_s)
            if now + pause_s >= until:
                raise
            log.warning("calling again in %.1f s: %s", pause_s, error.message)
        await asyncio.sleep(pause_s)
    raise AssertionError("unreachable")
