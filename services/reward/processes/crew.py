"""Starts, restarts and ends the worker processes of a run together."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from services.reward.errors import EpisodeError, ScoringError

log = logging.getLogger(__name__)


class Member(Protocol):
    """Describes a worker process."""

    @property
    def pid(self) -> int: ...
    async def start(self) -> None: ...
    async def kill(self) -> None: ...


W = TypeVar("W", bound=Member)


class Crew(Generic[W]):
    """Runs `workers`. A dead one can be restarted while the others continue."""

    def __init__(self, workers: Sequence[W]):
        self._workers = workers
        self._restarts: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Returns the process ids of the workers."""
        return [worker.pid for worker in self._workers]

    @property
    def closed(self) -> bool:
        """Returns whether `close` was called."""
        return self._closed

    async def open(self) -> None:
        """Starts all workers concurrently. After a failure or cancellation, call `close` to end those that started.

        Raises:
            ScoringError, EpisodeError: A worker of a scorer, or of an environment, cannot start.
        """
        results = await asyncio.gather(*(worker.start() for worker in self._workers), return_exceptions=True)
        for error in results:
            if error is not None:
                raise error

    async def close(self) -> None:
        """Kills all workers; their calls fail as CRASHED."""
        self._closed = True
        for restart in self._restarts:
            restart.cancel()
        await asyncio.gather(*self._restarts, return_exceptions=True)
        await asyncio.gather(*(worker.kill() for worker in self._workers))

    def _restart(self, worker: W) -> asyncio.Task[None]:
        """Starts a dead worker again. If that fails, the next call that needs the worker says why."""
        restart = asyncio.create_task(self._start(worker))
        self._restarts.add(restart)
        restart.add_done_callback(self._restarts.discard)
        return restart

    async def _start(self, worker: W) -> None:
        try:
            await worker.start()
        except (ScoringError, EpisodeError, OSError) as error:
            log.warning("a worker did not restart: %s", error)
