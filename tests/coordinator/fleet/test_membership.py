"""Tests replicas that come and go during a run, and where their addresses come from."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lockstep.types.v1.types_pb2 import ModelCard, PolicyStamp, SamplingParams

from services.common.errors import InvalidInput, Reason, Unavailable
from services.coordinator.clients.replica import ReplicaState
from services.coordinator.clients.rollout import Affinity, Rollout
from services.coordinator.fleet.launch import Addresses
from services.coordinator.fleet.membership import discovered, following_replicas
from services.coordinator.runs.replicas import REPLICAS, parse_replicas, write_replicas
from services.coordinator.runs.run import Restarts
from tests.coordinator.fake_services import FakeReplica, make_config, make_prompt, replicas
from tests.support import PATIENCE_S, raises, until

STAMP = PolicyStamp(version=3, digest="d" * 32)
SAMPLING = SamplingParams(temperature=1, max_tokens=10)
SERVING, STALE = ReplicaState.SERVING, ReplicaState.STALE


@contextlib.asynccontextmanager
async def serving(fakes: Sequence[FakeReplica], **sections: Any) -> AsyncIterator[Rollout]:
    """Yields a client whose replicas have all committed STAMP."""
    rollout = Rollout([fake.address for fake in fakes], make_config(**sections))
    try:
        await rollout.open("run", ModelCard())
        for replica in rollout.replicas:
            await replica.commit(STAMP)
        yield rollout
    finally:
        await rollout.close()


def generating(rollout: Rollout, *indices: int, affinity: Affinity | None = None) -> "list[asyncio.Task[Any]]":
    return [
        asyncio.create_task(rollout.generate(index, make_prompt(index), [0, 1], SAMPLING, STAMP, affinity))
        for index in indices
    ]


def addresses(rollout: Rollout) -> list[str]:
    return [replica.address for replica in rollout.replicas]


def run_in(directory: Path, **rollout: Any) -> Any:
    return SimpleNamespace(config=make_config(runs_dir=directory.parent, name=directory.name, rollout=rollout))


async def test_a_newcomer_is_opened_at_once_and_generates_after_a_publication():
    async with replicas(2) as (old, new), serving([old]) as rollout:
        rollout.set_replicas([old.address, new.address])
        await until(lambda: rollout.replicas[-1].state is STALE)
        assert (new.num_opens, rollout.num_dead) == (1, 0)
        assert rollout.members == rollout.replicas
        await asyncio.gather(*generating(rollout, *range(4)))
        assert new.answered == []
        await rollout.replicas[1].commit(STAMP)
        await asyncio.gather(*generating(rollout, *range(4, 8)))
        assert new.answered


async def test_a_newcomer_that_is_not_up_yet_is_waited_for_in_the_background():
    async with replicas(1) as (old,), serving([old]) as rollout:
        late = FakeReplica()
        rollout.set_replicas([old.address, late.address])
        await asyncio.gather(*generating(rollout, 0))
        assert (rollout.members, rollout.num_dead) == (rollout.replicas[:1], 0)
        await late.start()
        await until(lambda: rollout.members == rollout.replicas)
        await late.die()


async def test_a_leaver_gets_nothing_new_finishes_and_is_closed():
    async with replicas(2) as (leaver, other), serving([leaver, other]) as rollout:
        gate, affinity = asyncio.Event(), Affinity()
        leaver.before_answer = other.before_answer = lambda prompt: gate.wait()
        first = generating(rollout, 0, affinity=affinity) + generating(rollout, 1)
        await until(lambda: leaver.in_flight and other.in_flight)
        assert affinity.replica is rollout.replicas[0]
        rollout.set_replicas([other.address])
        later = generating(rollout, *range(2, 6)) + generating(rollout, 6, affinity=affinity)
        await until(lambda: other.in_flight == 2 * 6)
        assert addresses(rollout) == [leaver.address, other.address]
        gate.set()
        await asyncio.gather(*first, *later)
        assert leaver.answered == ["p0"]
        assert addresses(rollout) == [other.address]
        await until(lambda: leaver.closed == ["run"])
        assert rollout.num_redispatched == 0


async def test_groups_of_a_leaver_that_dies_go_to_another():
    async with replicas(2) as (leaver, other), serving([leaver, other]) as rollout:
        leaver.before_answer = lambda prompt: asyncio.Event().wait()
        tasks = generating(rollout, *range(4))
        await until(lambda: leaver.in_flight)
        rollout.set_replicas([other.address])
        await leaver.die()
        await asyncio.gather(*tasks)
        assert sorted(other.answered) == [f"p{index}" for index in range(4)]
        assert addresses(rollout) == [other.address]
        assert not rollout._reviving


async def test_the_last_one_stays_until_another_serves():
    async with replicas(2) as (old, new), serving([old]) as rollout:
        new.error["OpenRun"], new.failures_left = Unavailable("starting"), 1
        rollout.set_replicas([new.address])
        await asyncio.gather(*generating(rollout, *range(3)))
        assert len(old.answered) == 3
        assert addresses(rollout) == [old.address, new.address]
        await until(lambda: [replica.address for replica in rollout.members] == [new.address])
        await rollout.replicas[1].commit(STAMP)
        rollout.drop_leavers()
        await asyncio.gather(*generating(rollout, 3))
        assert (addresses(rollout), new.answered) == ([new.address], ["p3"])


class SlowToClose(FakeReplica):
    """Closes a run only when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.may_close, self.calls = asyncio.Event(), list[str]()

    async def OpenRun(self, request: Any, context: Any) -> Any:
        self.calls.append("OpenRun")
        return await super().OpenRun(request, context)

    async def CloseRun(self, request: Any, context: Any) -> Any:
        self.calls.append("CloseRun")
        await self.may_close.wait()
        self.calls.append("closed")
        return await super().CloseRun(request, context)


async def test_one_that_comes_back_at_once_is_opened_after_it_was_closed():
    async with replicas(2, SlowToClose) as (fickle, other), serving([fickle, other]) as rollout:
        rollout.set_replicas([other.address])
        await until(lambda: "CloseRun" in fickle.calls)
        rollout.set_replicas([fickle.address, other.address])
        assert await rollout.replicas[-1].is_alive()  # an OpenRun would have arrived before
        fickle.may_close.set()
        await until(lambda: rollout.replicas[-1].state is STALE)
        assert fickle.calls == ["OpenRun", "CloseRun", "closed", "OpenRun"]


async def test_a_run_follows_the_file_in_its_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    run, restarts = run_in(tmp_path), Restarts(make_config().restart)
    async with replicas(3) as fakes, serving(fakes[:2]) as rollout:
        first, second, third = (fake.address for fake in fakes)
        async with following_replicas(run, rollout, restarts):
            file = tmp_path / REPLICAS
            assert parse_replicas(file.read_text()) == [first, second]
            write_replicas(tmp_path, [second, third])
            await until(lambda: addresses(rollout) == [second, third])
            file.write_text(f"# on the new rack\n{third}  # spot\n\n{first}\n")  # in place, by hand
            await until(lambda: set(addresses(rollout)) >= {third, first})
            for nonsense in ("", "no address\n"):
                file.write_text(nonsense)
                for _ in range(2):
                    await rollout.before_publication()
            for said in ("the list is empty", "'no address' is not HOST:PORT"):
                assert caplog.text.count(said) == 1
            assert "the list is empty" in caplog.text and "'no address' is not HOST:PORT" in caplog.text
            assert {third, first} <= set(addresses(rollout))
        assert not file.exists()
    assert (restarts.added, restarts.removed) == ([third], [second])


async def test_a_repeated_session_has_the_replicas_of_the_last(tmp_path: Path):
    restarts = Restarts(make_config().restart)
    async with replicas(3) as fakes:
        first, second, third = (fake.address for fake in fakes)
        restarts.added, restarts.removed = [third], [first]
        async with serving(fakes[:2]) as rollout, following_replicas(run_in(tmp_path), rollout, restarts):
            await rollout.before_publication()
            assert addresses(rollout) == [second, third]


async def test_a_colocated_run_keeps_its_replicas(tmp_path: Path):
    run = SimpleNamespace(config=make_config(runs_dir=tmp_path, placement="colocated"))
    async with replicas(1) as fakes, serving(fakes) as rollout:
        async with following_replicas(run, rollout, Restarts(run.config.restart)):
            assert rollout.before_publication is None
        assert not list(tmp_path.iterdir())


async def test_a_config_names_a_file_or_a_dns_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    listed = tmp_path / "listed"
    config = make_config(rollout={"discovery": {"kind": "file", "path": str(listed)}})
    waiting = asyncio.create_task(discovered(config, Addresses()))
    await until(lambda: f"waiting up to 120 s: {listed}: No such file" in caplog.text)
    listed.write_text("10.0.0.1:50051\n")
    async with asyncio.timeout(PATIENCE_S):
        assert (await waiting).rollout == ("10.0.0.1:50051",)
    listed.write_text("10.0.0.1\n")
    with raises(InvalidInput, field="rollout.discovery"):
        await discovered(config, Addresses())
    with raises(InvalidInput, field="--rollout"):
        await discovered(config, Addresses(rollout=("10.0.0.2:50051",)))

    async def resolve(self: Any, host: str, port: int, **_: Any) -> list[Any]:
        if host != "rollout.svc":
            raise socket.gaierror(socket.EAI_NONAME, "unknown name")
        pods = [(socket.AF_INET, "10.0.0.2"), (socket.AF_INET, "10.0.0.1"), (socket.AF_INET6, "fd00::1")]
        return [(family, socket.SOCK_STREAM, 6, "", (at, port)) for family, at in pods]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolve)
    config = make_config(rollout={"discovery": {"kind": "dns", "name": "rollout.svc", "port": 7}})
    found = await discovered(config, Addresses())
    assert found.rollout == ("10.0.0.1:7", "10.0.0.2:7")
    assert (found.rollout_transport.name, found.transport.name) == ("rollout.svc", "")
    impatient = make_config(rollout={"discovery": {"kind": "dns", "name": "elsewhere"}}, timeouts={"open_s": 0.01})
    with raises(Unavailable, reason=Reason.NO_REPLICA) as caught:
        await discovered(impatient, Addresses())
    assert "the DNS name elsewhere: unknown name" in caught.value.message


async def test_the_list_of_a_discovered_run_is_shown_in_its_directory(tmp_path: Path):
    listed = tmp_path / "listed"
    directory = tmp_path / "run"
    directory.mkdir()
    run = run_in(directory, discovery={"kind": "file", "path": str(listed)})
    async with replicas(2) as fakes, serving(fakes[:1]) as rollout:
        listed.write_text(fakes[0].address)
        async with following_replicas(run, rollout, Restarts(run.config.restart)):
            listed.write_text("\n".join(fake.address for fake in fakes))
            await until(lambda: parse_replicas((directory / REPLICAS).read_text()) == addresses(rollout)[:2])
            await until(lambda: len(addresses(rollout)) == 2)
