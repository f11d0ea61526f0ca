"""Lets trainer and engines hold the GPUs that they share one after the other.

A client holds the GPUs for its side during every call that needs memory there. If each service has its own GPUs, that
costs nothing. Otherwise a side waits until nobody holds them for the other side, and then the switch that was set with
`on_switch` is made.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from enum import StrEnum

from services.common.config.run import Config

Switch = Callable[[], Awaitable[None]]


class Side(StrEnum):
    """Names the sides that can hold the GPUs."""

    TRAINER = "trainer"
    ENGINES = "engines"


class OwnGpus:
    """Manages the GPUs of a run in which each service has its own."""

    @asynccontextmanager
    async def held_by(self, side: Side) -> AsyncIterator[None]:
        """Holds the GPUs for one side inside the block, which any number of callers of that side may enter."""
        yield

    @asynccontextmanager
    async def opening_engine(self) -> AsyncIterator[None]:
        """Holds the GPUs for an engine that starts, which has no weights yet."""
        yield


class SharedGpus(OwnGpus):
    """Manages the GPUs of a colocated run. The engines hold them first."""

    def __init__(self) -> None:
        self._side, self._num_holders = Side.ENGINES, 0
        self._changed = asyncio.Condition()
        self._switches: Mapping[Side, Switch] = {}
        self._notifying: set[asyncio.Task[None]] = set()

    def on_switch(self, switches: Mapping[Side, Switch]) -> None:
        """Sets the function that is awaited when the GPUs go from one side to the other. Nobody holds them
        meanwhile."""
        self._switches = switches

    @asynccontextmanager
    async def held_by(self, side: Side) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: self._side is side or not self._num_holders)
            if self._side is not side:
                await self._switches[side]()
                self._side = side
            self._num_holders += 1
        try:
            yield
        finally:
            self._release()

    @asynccontextmanager
    async def opening_engine(self) -> AsyncIterator[None]:
        """Waits until the engines hold the GPUs, without a switch."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._side is Side.ENGINES)
            self._num_holders += 1
        try:
            yield
        finally:
            self._release()

    @asynccontextmanager
    async def passing_to_engines(self) -> AsyncIterator[Side]:
        """Waits until nobody holds the GPUs and yields who had them last. After the block the engines have them."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._num_holders)
            yield self._side
            self._side = Side.ENGINES
            self._changed.notify_all()

    def _release(self) -> None:
        self._num_holders -= 1
        task = asyncio.create_task(self._notify())  # a canceled caller must not wait for the lock
        self._notifying.add(task)
        task.add_done_callback(self._notifying.discard)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def gpus_of(config: Config) -> OwnGpus:
    """Returns the GPUs of a run's placement."""
    return SharedGpus() if config.placement == "colocated" else OwnGpus()
