"""Structured concurrency, with the failure that happened instead of a group of one."""

import asyncio
import functools
import random
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

Result = TypeVar("Result")
Method = TypeVar("Method", bound=Callable[..., Coroutine[Any, Any, Any]])

_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.5, 30.0


async def gather(coroutines: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Runs all at once; the first failure cancels the rest and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def shielded(method: Method) -> Method:
    """Lets a call go on when its caller gives up: what it began must be recorded before the next call."""

    @functools.wraps(method)
    async def call(*args: Any) -> Any:
        return await asyncio.shield(method(*args))

    return call


def backoff_s(num_retries: int) -> float:
    """Pause before a retry of a remote: doubles each time; the random half keeps many callers from coming together."""
    doublings = min(num_retries, 10)  # far beyond the limit, and small enough for a float
    return min(_FIRST_BACKOFF_S * 2**doublings, _MAX_BACKOFF_S) * random.uniform(0.5, 1.0)
