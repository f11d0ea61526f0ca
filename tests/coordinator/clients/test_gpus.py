"""Tests shared GPUs: one side holds them at a time, with a switch in between only if it is needed."""

import asyncio

import pytest

from services.common.errors import Unavailable
from services.coordinator.clients.gpus import OwnGpus, SharedGpus, Side, gpus_of
from tests.coordinator.fake_services import make_config

TRAINER, ENGINES = Side.TRAINER, Side.ENGINES


class Gpus:
    """Notes what happens, and fails if two sides are there at once."""

    def __init__(self) -> None:
        self.shared, self.events = SharedGpus(), []
        self.users = {TRAINER: 0, ENGINES: 0}
        self.shared.on_switch({side: self._switch(side) for side in Side})

    def _switch(self, side: Side):
        async def switch() -> None:
            assert not any(self.users.values())
            await asyncio.sleep(0)
            self.events.append(f"to {side}")

        return switch

    async def use(self, side: Side, until: asyncio.Event | None = None) -> None:
        async with self.shared.held_by(side):
            self.users[side] += 1
            assert not self.users[TRAINER if side is ENGINES else ENGINES]
            self.events.append(side)
            try:
                if until:
                    await until.wait()
            finally:
                self.users[side] -= 1


async def test_a_side_keeps_the_gpus_until_the_other_wants_it() -> None:
    gpus = Gpus()
    for side in (ENGINES, ENGINES, TRAINER, TRAINER, ENGINES):
        await gpus.use(side)
    assert gpus.events == ["engines", "engines", "to trainer", "trainer", "trainer", "to engines", "engines"]


async def test_the_other_side_waits_for_all_users() -> None:
    gpus, first, second = Gpus(), asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for ends in (first, second):
            tasks.create_task(gpus.use(ENGINES, ends))
        await asyncio.sleep(0)
        tasks.create_task(gpus.use(TRAINER))
        first.set()
        for _ in range(20):
            await asyncio.sleep(0)
        assert gpus.events == ["engines", "engines"]
        second.set()
    assert gpus.events[2:] == ["to trainer", "trainer"]


async def test_a_canceled_user_gives_them_back() -> None:
    gpus = Gpus()
    task = asyncio.create_task(gpus.use(ENGINES, asyncio.Event()))
    await asyncio.sleep(0)
    assert gpus.events == ["engines"]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(gpus.use(TRAINER), 60)
    assert gpus.events == ["engines", "to trainer", "trainer"]


async def test_a_switch_that_fails_is_tried_again_by_the_next() -> None:
    gpus, fails = Gpus(), iter((True, False))

    async def switch() -> None:
        if next(fails):
            raise Unavailable("gone")

    gpus.shared.on_switch({TRAINER: switch})
    with pytest.raises(Unavailable):
        await gpus.use(TRAINER)
    await gpus.use(TRAINER)
    assert gpus.events == ["trainer"]


async def test_a_publication_passes_them_to_the_engines_without_a_switch() -> None:
    gpus = Gpus()
    async with gpus.shared.passing_to_engines() as side:
        assert side is ENGINES
    await gpus.use(TRAINER)
    async with gpus.shared.passing_to_engines() as side:
        assert side is TRAINER
    await gpus.use(ENGINES)
    assert gpus.events == ["to trainer", "trainer", "engines"]


async def test_an_engine_opens_only_while_engines_have_them() -> None:
    gpus = Gpus()
    await gpus.use(TRAINER)

    async def open_engine() -> None:
        async with gpus.shared.opening_engine():
            gpus.events.append("opened")

    opening = asyncio.create_task(open_engine())
    await gpus.use(TRAINER)
    assert not opening.done()
    async with gpus.shared.passing_to_engines():
        gpus.events.append("published")
    await asyncio.wait_for(opening, 60)
    assert gpus.events[-2:] == ["published", "opened"]


async def test_who_has_own_gpus_never_waits() -> None:
    own = gpus_of(make_config())
    assert type(own) is OwnGpus
    async with own.held_by(TRAINER), own.held_by(ENGINES), own.opening_engine():
        pass
    shared = make_config(placement="colocated")
    assert type(gpus_of(shared)) is SharedGpus
