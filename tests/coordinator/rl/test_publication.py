"""Tests publication with replicas that fail in each of its phases."""

import asyncio
import contextlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from lockstep.rollout.v1 import rollout_pb2 as pb
from lockstep.trainer.v1.trainer_pb2 import OpenRunResponse
from lockstep.types.v1.types_pb2 import ModelCard, PolicyStamp, WeightGroup, WeightPlan

from services.common.errors import Aborted, DeadlineExceeded, PreconditionFailed, Reason, Unavailable
from services.coordinator.clients.replica import ReplicaState
from services.coordinator.clients.rollout import Rollout
from services.coordinator.rl.publishing import Publisher
from tests.coordinator.fake_services import FakeReplica, make_config, replicas
from tests.support import LIMITS_S, PATIENCE_S, raises, until

DEAD, STALE, SERVING = ReplicaState.DEAD, ReplicaState.STALE, ReplicaState.SERVING


@dataclass
class FakeTrainer:
    """Sends immediately, from two ranks, weights with the digest `digest`."""

    opened: OpenRunResponse = field(
        default_factory=lambda: OpenRunResponse(store_host="h", weight_backend="gloo", plan=WeightPlan(num_senders=2))
    )
    digest: str = "digest"
    plan_digest: str = "plan"
    groups: list[WeightGroup] = field(default_factory=list)

    async def join(self, group: WeightGroup) -> str:
        self.groups.append(group)
        return self.plan_digest

    async def send(self, epoch: int, version: int) -> PolicyStamp:
        assert epoch == self.groups[-1].epoch
        return PolicyStamp(version=version, digest=self.digest)


class FakeRun(SimpleNamespace):
    """Fakes the run, its record and its ledger."""

    @property
    def record(self) -> "FakeRun":
        return self

    @property
    def ledger(self) -> "FakeRun":
        return self

    async def free(self) -> None: ...

    def next_epoch(self, num_replicas: int) -> int:
        self.epochs.append(num_replicas)
        return len(self.epochs)

    def record_published(self, stamp: PolicyStamp, received: dict[str, str], quantized: str) -> None:
        self.published.append(stamp.version)
        self.received, self.quantized = received, quantized


@dataclass
class Parts:
    fakes: list[FakeReplica]
    rollout: Rollout
    trainer: FakeTrainer
    run: FakeRun
    publisher: Publisher

    @property
    def states(self) -> list[ReplicaState]:
        return [replica.state for replica in self.rollout.replicas]

    async def until(self, *states: ReplicaState) -> None:
        await until(lambda: self.states == list(states))


@pytest_asyncio.fixture
async def parts():
    config = make_config()
    async with replicas(2) as fakes:
        rollout = Rollout([fake.address for fake in fakes], config)
        await rollout.open("run", ModelCard())
        trainer, run = FakeTrainer(), FakeRun(config=config, run_id="run", epochs=[], published=[])
        yield Parts(fakes, rollout, trainer, run, Publisher(trainer, rollout, run))
        await rollout.close()


async def test_a_group_stays_as_long_as_its_members(parts: Parts):
    for version in (0, 1, 2):
        assert await parts.publisher.publish(version) == PolicyStamp(version=version, digest="digest")
    assert parts.run.epochs == [2]
    assert parts.run.published == [0, 1, 2]
    assert [fake.epochs for fake in parts.fakes] == [[(1, 4)], [(1, 4)]]
    assert [[stamp.version for stamp in fake.committed] for fake in parts.fakes] == [[0, 1, 2]] * 2
    assert parts.states == [SERVING, SERVING]


@pytest.mark.parametrize("method", ["JoinWeightGroup", "ReceiveWeights", "CommitWeights"])
async def test_one_that_dies_drops_out_and_the_rest_get_a_new_epoch(parts: Parts, method: str):
    survivor, mortal = parts.fakes
    dying = asyncio.Event()

    async def die_in_call(request, context):
        dying.set()
        await asyncio.Event().wait()

    setattr(mortal, method, die_in_call)
    await mortal.die()
    await mortal.start()  # the handlers are bound when the server starts
    publishing = asyncio.create_task(parts.publisher.publish(5))
    await asyncio.wait_for(dying.wait(), PATIENCE_S)
    await mortal.die()
    stamp = await asyncio.wait_for(publishing, PATIENCE_S)
    assert parts.states == [SERVING, DEAD]
    assert parts.run.epochs == [2, 1]
    assert parts.run.published == [5]
    assert survivor.committed[-1] == stamp
    assert survivor.epochs == [(1, 4), (2, 3)]

    delattr(mortal, method)
    await mortal.start()
    await parts.until(SERVING, STALE)
    await parts.publisher.publish(6)
    assert parts.states == [SERVING, SERVING]
    assert parts.run.epochs == [2, 1, 2]
    assert [stamp.version for stamp in mortal.committed] == [6]


async def test_one_that_leaves_in_a_publication_is_dropped_after_it(parts: Parts):
    """Dropping it at once would end its calls, and the run with them."""
    survivor, leaver = parts.fakes
    asked, goes_on = asyncio.Event(), asyncio.Event()

    async def commit(request: pb.CommitWeightsRequest, context: Any) -> pb.CommitWeightsResponse:
        asked.set()
        await goes_on.wait()
        return pb.CommitWeightsResponse()

    leaver.CommitWeights = commit
    await leaver.die()
    await leaver.start()  # the handlers are bound when the server starts
    publishing = asyncio.create_task(parts.publisher.publish(5))
    await asyncio.wait_for(asked.wait(), PATIENCE_S)
    await parts.until(SERVING, STALE)
    parts.rollout.set_replicas([survivor.address])
    assert parts.states == [SERVING, STALE]
    goes_on.set()
    await asyncio.wait_for(publishing, PATIENCE_S)
    assert (parts.states, parts.run.published) == ([SERVING], [5])
    await until(lambda: leaver.closed == ["run"])


async def test_one_that_came_back_between_two_publications_is_a_new_member(parts: Parts):
    await parts.publisher.publish(0)
    await parts.fakes[0].die()
    parts.rollout.mark_dead(parts.rollout.replicas[0], Unavailable("gone"))
    await parts.fakes[0].start()
    await parts.until(STALE, SERVING)
    await parts.publisher.publish(1)
    # The group is formed again before anything is sent, because the new process never joined the first epoch.
    assert parts.run.epochs == [2, 2]
    assert parts.states == [SERVING, SERVING]


async def test_being_replaced_is_the_cause_of_what_the_members_say(parts: Parts, caplog: pytest.LogCaptureFixture):
    async def join(group: WeightGroup) -> str:
        await until(lambda: not any(fake.failures_left for fake in parts.fakes))
        raise PreconditionFailed("run s has replaced run r", reason=Reason.RUN_REPLACED)

    parts.trainer.join = join
    for fake in parts.fakes:
        fake.error["JoinWeightGroup"], fake.failures_left = Aborted("the trainer's store is gone"), 1
    with raises(PreconditionFailed, reason=Reason.RUN_REPLACED):
        await parts.publisher.publish(3)
    assert "publication of version 3 failed" not in caplog.text


async def test_a_passing_fault_costs_an_epoch(parts: Parts):
    parts.fakes[1].error["ReceiveWeights"] = Aborted("a lost packet")
    parts.fakes[1].failures_left = 1
    await parts.publisher.publish(0)
    assert parts.run.epochs == [2, 2]
    assert parts.states == [SERVING, SERVING]


class WaitingTrainer(FakeTrainer):
    """Gives up on `hung`, the last member, as a real one does: only in a join is it known who is missing."""

    hung: FakeReplica

    async def join(self, group: WeightGroup) -> str:
        await super().join(group)
        if group.world_size == 4 and self.hung.hangs_in == "JoinWeightGroup":
            raise Aborted("waited 20 s for all members to join; missing: 3", absent="3")
        return self.plan_digest

    async def send(self, epoch: int, version: int) -> PolicyStamp:
        if self.groups[-1].world_size == 4 and self.hung.hangs_in == "ReceiveWeights":
            raise Aborted("waited 20 s for a broadcast")
        return await super().send(epoch, version)


async def publish_within(parts: Parts, limit_s: float, version: int) -> None:
    """Publishes with `limit_s` for every phase."""
    limits = {"weights": {"timeout_s": limit_s}, "timeouts": {"publish_s": limit_s}}
    parts.run.config = make_config(**limits)
    for replica in parts.rollout.replicas:
        replica._timeouts = parts.run.config.timeouts
    await Publisher(parts.trainer, parts.rollout, parts.run).publish(version)


@pytest.mark.parametrize("method", ["JoinWeightGroup", "ReceiveWeights", "CommitWeights"])
async def test_one_that_hangs_twice_is_named_and_dropped_and_gets_another_engine(
    parts: Parts, method: str, caplog: pytest.LogCaptureFixture
):
    survivor, hung = parts.fakes
    parts.trainer = WaitingTrainer()
    parts.trainer.hung = hung
    for limit_s in LIMITS_S:
        hung.hangs_in, parts.run.epochs[:] = method, []
        with contextlib.suppress(Aborted, DeadlineExceeded):  # the machine was too slow for this limit
            await publish_within(parts, limit_s, 5)
            break
    assert parts.run.epochs[-3:] == [2, 2, 1]
    assert survivor.committed[-1].version == 5
    assert parts.rollout.replicas[0].state is SERVING
    named = [record.getMessage() for record in caplog.records if "did not take part" in record.getMessage()]
    assert len(named) >= 2
    assert all(f"replica {hung.address} did not take part" in message for message in named[-2:])

    await until(lambda: hung.closed)
    await parts.until(SERVING, STALE)
    parts.run.config = make_config()
    await Publisher(parts.trainer, parts.rollout, parts.run).publish(6)
    assert parts.states == [SERVING, SERVING]
    assert [stamp.version for stamp in hung.committed] == [6]


async def test_one_that_missed_the_last_publication_is_dropped_at_its_next_miss(parts: Parts):
    parts.trainer = WaitingTrainer()
    parts.trainer.hung = parts.fakes[1]
    publisher = Publisher(parts.trainer, parts.rollout, parts.run)
    for version in (5, 6):
        parts.fakes[1].hangs_in = "JoinWeightGroup"
        await publisher.publish(version)
        await parts.until(SERVING, STALE)
    assert parts.run.epochs == [2, 2, 1, 2, 1]
    await publisher.publish(7)
    assert parts.states == [SERVING, SERVING]
    parts.fakes[1].hangs_in = "JoinWeightGroup"
    parts.rollout.replicas[1].num_opens += 1  # so that the group is formed again
    await publisher.publish(8)  # it has taken part since, so it may miss one more
    assert parts.run.epochs == [2, 2, 1, 2, 1, 2, 2, 2, 1]


async def test_nobody_is_dropped_if_all_that_are_left_hang(parts: Parts):
    parts.trainer = WaitingTrainer()
    parts.trainer.hung = parts.fakes[1]
    for fake in parts.fakes:
        fake.error["JoinWeightGroup"] = Aborted("waited 20 s; missing: 2,3", absent="2,3")
    with pytest.raises(Aborted) as raised:
        await parts.publisher.publish(0)
    assert all(fake.address in raised.value.message for fake in parts.fakes)
    assert parts.run.epochs == [2, 2, 2]
    assert DEAD not in parts.states
    assert [fake.closed for fake in parts.fakes] == [[], []]


async def test_one_that_answers_with_an_error_is_not_taken_for_hung(parts: Parts):
    parts.fakes[0].hangs_in = "ReceiveWeights"
    parts.fakes[1].error["ReceiveWeights"] = PreconditionFailed("the wrong state")
    with pytest.raises(PreconditionFailed, match=r"^the wrong state"):
        await parts.publisher.publish(0)
    assert DEAD not in parts.states


async def test_a_fault_that_stays_is_reported_and_nothing_is_served(parts: Parts):
    parts.fakes[1].error["ReceiveWeights"] = Aborted("always")
    with pytest.raises(Aborted, match="always"):
        await parts.publisher.publish(0)
    assert parts.run.epochs == [2, 2, 2]
    assert parts.run.published == []
    assert [fake.committed for fake in parts.fakes] == [[], []]
    assert SERVING not in parts.states


async def test_other_bytes_are_never_committed(parts: Parts):
    parts.fakes[1].digest = "other"
    with pytest.raises(PreconditionFailed) as raised:
        await parts.publisher.publish(0)
    assert raised.value.reason is Reason.DIGEST_MISMATCH
    assert [fake.committed for fake in parts.fakes] == [[], []]
    assert parts.run.published == []


async def test_other_quantized_weights_are_never_committed(parts: Parts):
    for fake in parts.fakes:
        fake.quantized_digest = "same"
    await parts.publisher.publish(0)
    assert parts.run.quantized == "same"
    parts.fakes[1].quantized_digest = "other"  # of the same received bytes
    with raises(PreconditionFailed, reason=Reason.QUANTIZED_MISMATCH):
        await parts.publisher.publish(1)
    assert [[stamp.version for stamp in fake.committed] for fake in parts.fakes] == [[0], [0]]
    assert parts.run.published == [0]
    assert SERVING not in parts.states


async def test_one_that_does_not_quantize_is_another_replica(parts: Parts):
    parts.fakes[0].quantized_digest = "one"
    with raises(PreconditionFailed, reason=Reason.QUANTIZED_MISMATCH):
        await parts.publisher.publish(0)
    assert [fake.committed for fake in parts.fakes] == [[], []]


async def test_replicas_of_which_only_one_returns_experts_are_refused(parts: Parts):
    parts.rollout.replicas[0].returns_routed_experts = True
    with pytest.raises(PreconditionFailed, match=f"replica {parts.fakes[1].address} returns no routed experts"):
        await parts.publisher.publish(0)
    assert not parts.run.epochs


@pytest.mark.parametrize("who", ["replica", "trainer"])
async def test_another_plan_is_refused_before_anything_is_sent(parts: Parts, who: str):
    (parts.trainer if who == "trainer" else parts.fakes[0]).plan_digest = "other"
    with pytest.raises(PreconditionFailed) as raised:
        await parts.publisher.publish(0)
    assert raised.value.reason is Reason.PLAN_MISMATCH
    assert [fake.committed for fake in parts.fakes] == [[], []]


async def test_without_replicas_there_is_nobody_to_publish_to(parts: Parts):
    for fake in parts.fakes:
        await fake.die()
    with pytest.raises(Unavailable) as raised:
        await parts.publisher.publish(0)
    assert raised.value.reason is Reason.NO_REPLICA
    assert parts.states == [DEAD, DEAD]
