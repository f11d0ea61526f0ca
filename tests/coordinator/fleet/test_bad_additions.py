"""Tests that no address that is added to the replicas ends a run, and that the operator learns why it is unused."""

from pathlib import Path

import pytest
from lockstep.reward.v1 import reward_pb2_grpc
from lockstep.types.v1.types_pb2 import ModelCard

from services.common.errors import InvalidInput
from services.common.rpc.server import Server
from services.coordinator.clients.replica import ReplicaState
from services.coordinator.clients.rollout import Rollout
from services.coordinator.fleet.launch import Addresses
from services.coordinator.fleet.membership import following_replicas
from services.coordinator.rl.publishing import Publisher
from services.coordinator.runs.replicas import REPLICAS, Note, read_notes, write_replicas
from services.coordinator.runs.run import Restarts
from tests.coordinator.fake_services import FakeReplica, FakeReward, make_config, replicas
from tests.coordinator.rl.test_publication import FakeRun, FakeTrainer
from tests.support import free_port, raises, until

Log = pytest.LogCaptureFixture


class Opened:
    """A run with a replica, and what publishes to it."""

    def __init__(self, addresses: list[str], directory: Path = Path("runs/run")):
        config = make_config(runs_dir=directory.parent, name=directory.name)
        self.run = FakeRun(config=config, run_id="run", epochs=[], published=[])
        self.rollout = Rollout(addresses, config)
        self.publisher = Publisher(FakeTrainer(), self.rollout, self.run)  # type: ignore[arg-type]

    async def __aenter__(self) -> "Opened":
        await self.rollout.open("run", ModelCard())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.rollout.close()

    @property
    def addresses(self) -> list[str]:
        return [replica.address for replica in self.rollout.replicas]

    async def noted(self, address: str) -> Note:
        await until(lambda: address in self.rollout.notes.all)
        return self.rollout.notes.all[address]


def alias_of(fake: FakeReplica) -> str:
    fake.incarnation = f"process of {fake.address}"
    return fake.address.replace("127.0.0.1", "localhost")


async def test_another_name_of_a_replica_is_not_used(caplog: Log) -> None:
    async with replicas(2) as (fake, other), Opened([fake.address]) as opened:
        alias, rollout = alias_of(fake), opened.rollout
        rollout.replicas[0].incarnation = fake.incarnation
        await opened.publisher.publish(0)
        rollout.set_replicas([fake.address, alias])
        note = await opened.noted(alias)
        assert (note.is_unused, note.same_as) == (True, fake.address)
        rollout.set_replicas([alias, fake.address, other.address])
        await until(lambda: len(rollout.members) == 2)
        await opened.publisher.publish(1)
        assert opened.addresses == [fake.address, other.address]
        assert [epoch for epoch, _ in fake.epochs] == [1, 2]
        assert caplog.text.count(f"replica {alias} is not used: the same service as {fake.address}") == 1
        rollout.set_replicas([alias, other.address])  # it stays, under its other name
        await opened.publisher.publish(2)
        assert (opened.addresses, fake.closed) == ([fake.address, other.address], [])


async def test_at_its_start_a_run_uses_each_service_once(caplog: Log) -> None:
    async with replicas(1) as (fake,):
        alias = alias_of(fake)
        async with Opened([fake.address, alias]) as opened:
            await opened.publisher.publish(0)
            assert (opened.addresses, len(fake.epochs)) == ([fake.address], 1)
            assert f"replica {alias} is not used" in caplog.text


async def test_a_name_that_works_is_used_when_the_other_one_is_lost() -> None:
    async with replicas(1) as (fake,), Opened([fake.address]) as opened:
        alias, lost = alias_of(fake), opened.rollout.replicas[0]
        lost.incarnation, lost.state = fake.incarnation, ReplicaState.DEAD
        opened.rollout.set_replicas([fake.address, alias])
        await until(lambda: [one.address for one in opened.rollout.members] == [alias])


def test_an_address_that_is_given_twice_is_refused() -> None:
    with raises(InvalidInput, field="--rollout"):
        Addresses(rollout=("h:1", "h:2", "h:1"))


async def test_where_nothing_listens_the_reason_is_shown(tmp_path: Path, caplog: Log) -> None:
    caplog.set_level("INFO")
    async with replicas(1) as (fake,), Opened([fake.address], tmp_path) as opened:
        nobody = f"127.0.0.1:{free_port()}"
        restarts = Restarts(opened.run.config.restart)
        async with following_replicas(opened.run, opened.rollout, restarts):  # type: ignore[arg-type]
            write_replicas(tmp_path, [fake.address, nobody])
            note = await opened.noted(nobody)
            assert note == Note("unreachable: connection refused")
            assert read_notes(tmp_path) == {nobody: note}
            write_replicas(tmp_path, [fake.address])
            await until(lambda: not read_notes(tmp_path))
        assert not list(tmp_path.glob(f"{REPLICAS}*"))
        assert f"replica {nobody} is not there yet: " in caplog.text
        assert f"{nobody} is opened" not in caplog.text


async def test_a_service_of_another_kind_is_not_used(caplog: Log) -> None:
    server = Server()
    reward_pb2_grpc.add_RewardServiceServicer_to_server(FakeReward(set()), server.grpc)
    reward = f"127.0.0.1:{await server.start('127.0.0.1:0', ['lockstep.reward.v1.RewardService'])}"
    async with replicas(1) as (fake,), Opened([fake.address]) as opened:
        opened.rollout.set_replicas([fake.address, reward])
        note = await opened.noted(reward)
        assert (note.is_unused, opened.addresses) == (True, [fake.address])
        assert f"replica {reward} is not used: {reward} is not a rollout service" in caplog.text.lower()
    await server.grpc.stop(0)


async def test_a_newcomer_with_which_no_publication_succeeds_is_not_used(caplog: Log) -> None:
    async with replicas(2) as (fake, bad), Opened([fake.address]) as opened:
        bad.plan_digest = "another plan"
        await opened.publisher.publish(0)
        opened.rollout.set_replicas([fake.address, bad.address])
        await until(lambda: len(opened.rollout.members) == 2)
        await opened.publisher.publish(1)
        assert (opened.run.published, opened.addresses) == ([0, 1], [fake.address])
        assert "different plans" in opened.rollout.notes.all[bad.address].why
