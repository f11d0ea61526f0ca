"""Says whose turn it is on the GPUs that trainer and engines share.

Clients enter a turn around every call that needs memory on a GPU. If each service has its own GPUs, turns cost nothing.
Otherwise a turn begins when nobody uses the other one any more, after what `SharedGpus` was told to do for the switch.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from enum import StrEnum

from services.common.config.run import Config

Switch = Callable[[], Awaitable[None]]


class Side(StrEnum):
    """Who has the GPUs."""

    TRAINER = "trainer"
    ENGINES = "engines"


class Turns:
    """The turns of a run in which trainer and engines have GPUs of their own."""

    @asynccontextmanager
    async def of(self, side: Side) -> AsyncIterator[None]:
        """Keeps the GPUs for one side inside the block, which any number of callers of that side may enter."""
        yield

    @asynccontextmanager
    async def opening_engine(self) -> AsyncIterator[None]:
        """Keeps the GPUs for an engine that starts, which has no weights yet."""
        yield


class SharedGpus(Turns):
    """The turns of a colocated run. The engines have the first one."""

    def __init__(self) -> None:
        self._side, self._num_users = Side.ENGINES, 0
        self._changed = asyncio.Condition()
        self._switches: Mapping[Side, Switch] = {}

    def on_switch(self, switches: Mapping[Side, Switch]) -> None:
        """Sets what is awaited before the turn of a side begins. Inside it, nobody has a turn."""
        self._switches = switches

    @asynccontextmanager
    async def of(self, side: Side) -> AsyncIterator[None]:
        """Keeps the GPUs for one side; switches first if the other had them, as soon as nobody uses those."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._side is side or not self._num_users)
            if self._side is not side:
                await self._switches[side]()
                self._side = side
            self._num_users += 1
        async with self._released():
            yield

    @asynccontextmanager
    async def opening_engine(self) -> AsyncIterator[None]:
        """Waits until the engines have the GPUs, without a switch."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._side is Side.ENGINES)
            self._num_users += 1
        async with self._released():
            yield

    @asynccontextmanager
    async def passing_to_engines(self) -> AsyncIterator[Side]:
        """Waits until nobody has a turn and yields who had the last one. After the block, the engines have the next."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._num_users)
            yield self._side
            self._side = Side.ENGINES
            self._changed.notify_all()

    @asynccontextmanager
    async def _released(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            self._num_users -= 1
            # Not `async with`: a canceled task must give its turn back too.
            asyncio.get_running_loop().create_task(self._notify())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def turns_of(config: Config) -> Turns:
    """Returns the turns of a run's placement."""
    return SharedGpus() if config.placement == "colocated" else Turns()
