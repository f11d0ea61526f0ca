"""Runs tasks with structured concurrency, raising the first failure itself instead of an exception group."""

import asyncio
import random
from collections.abc import AsyncGenerator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Never, TypeVar

Result = TypeVar("Result")

_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.5, 30.0


async def gather(coroutines: Iterable[Coroutine[object, Never, Result]]) -> list[Result]:
    """Runs all coroutines concurrently and returns their results. The first failure cancels the rest and is raised."""
    async with task_group() as group:
        tasks = [group.create_task(coroutine) for coroutine in coroutines]
    return [task.result() for task in tasks]


def keep(tasks: set[asyncio.Task[Result]], coroutine: Coroutine[object, Never, Result]) -> asyncio.Task[Result]:
    """Runs the coroutine as a task that `tasks` has until it ends, as asyncio itself keeps no task alive."""
    task = asyncio.create_task(coroutine)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


@asynccontextmanager
async def task_group() -> AsyncGenerator[asyncio.TaskGroup]:
    """Yields a TaskGroup; the first failure, in a task or in the block, is raised as it is, not in a group."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


def backoff_s(num_retries: int) -> float:
    """Returns the pause before a retry. It doubles with each retry; a random factor spreads out concurrent callers."""
    doublings = min(num_retries, 10)  # well above the limit, and small enough not to overflow a float
    return min(_FIRST_BACKOFF_S * 2**doublings, _MAX_BACKOFF_S) * random.uniform(0.5, 1.0)
