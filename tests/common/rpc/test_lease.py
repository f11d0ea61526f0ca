"""Tests that a service closes a run whose coordinator has gone without closing it, and no other run."""

import asyncio
from collections.abc import AsyncIterator
from unittest import mock

import pytest

from services.common.errors import InvalidInput
from services.common.rpc.fence import HEADER, LEASE_HEADER, Fence, Lease, incoming, new_token, outgoing
from tests.support import PATIENCE_S, raises


class FakeService:
    """Imitates a service with an open run, and has a clock that the test moves."""

    def __init__(self):
        self.closed = asyncio.Event()
        self.run_id = "a"
        self.lease = Lease(self.close)
        self.now = asyncio.get_running_loop().time()

    async def close(self) -> None:
        if self.lease.has_ended(self.run_id):
            self.closed.set()

    async def after(self, seconds: float, *, due: float) -> bool:
        """Moves the clock, runs the timer that was due at `due`, and returns whether the run was closed."""
        self.now += seconds
        self.lease._check(due)
        if self.lease._closing:
            await self.lease._closing
        return self.closed.is_set()


@pytest.fixture
async def service() -> AsyncIterator[FakeService]:
    service = FakeService()
    with mock.patch.object(asyncio.get_running_loop(), "time", lambda: service.now):
        yield service


async def test_a_run_is_closed_when_its_lease_ends():
    service = FakeService()
    service.lease.begin(0.01)
    async with asyncio.timeout(PATIENCE_S):
        await service.closed.wait()


async def test_a_renewed_lease_does_not_end(service: FakeService):
    begin = service.now
    service.lease.begin(100)
    service.now += 60
    service.lease.renew()
    assert not await service.after(45, due=begin + 100)
    assert await service.after(60, due=begin + 160)


async def test_who_was_stopped_itself_gives_the_coordinator_another_chance(service: FakeService):
    """While the service itself was stopped, calls of the coordinator may have arrived that it has not read."""
    begin = service.now
    service.lease.begin(100)
    assert not await service.after(400, due=begin + 100)
    assert await service.after(101, due=begin + 500)


async def test_a_coordinator_that_comes_while_the_run_is_about_to_be_closed_keeps_it(service: FakeService):
    service.lease.begin(100)
    service.now += 101
    service.lease.begin(100)
    await service.close()
    assert not service.closed.is_set()


async def test_without_a_lease_or_a_run_nothing_ends(service: FakeService):
    service.lease.begin(0)
    service.now += 1e9
    assert not service.lease.has_ended("a")
    service.lease.begin(1)
    service.now += 2
    assert service.lease.has_ended("a")
    assert not service.lease.has_ended("")


async def test_only_calls_of_the_coordinator_renew(service: FakeService):
    fence = Fence()
    with new_token(100):
        mine = outgoing()
    with incoming(mine):
        fence.take_over("a")
    service.now += 60
    with incoming([(HEADER, "doctor")]):
        fence.renew_lease()
    service.now += 60
    assert fence.lease.has_ended("a")
    with incoming(mine):
        fence.require()
    assert not fence.lease.has_ended("a")


@pytest.mark.parametrize("lease", ["-1", "nan", "inf", "soon"])
def test_a_lease_is_a_number_of_seconds(lease: str):
    with incoming([(HEADER, "token"), (LEASE_HEADER, lease)]), raises(InvalidInput, field=LEASE_HEADER):
        Fence().take_over("a")
