"""Tests dispatch to replicas that are slow, serve wrong weights, die and come back."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from lockstep.rollout.v1 import rollout_pb2 as pb
from lockstep.types.v1.types_pb2 import ModelCard, PolicyStamp, SamplingParams

from services.common.errors import (
    DataLoss,
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    LockstepError,
    PermissionDenied,
    PreconditionFailed,
    Reason,
    Unauthenticated,
    Unavailable,
)
from services.common.routed_experts import to_parts
from services.common.rpc.transfer import seal
from services.coordinator.clients import replicas as replica_set
from services.coordinator.clients.replica import Replica, ReplicaState
from services.coordinator.clients.rollout import Affinity, Rollout
from services.coordinator.data.groups import SampledGroup
from tests.coordinator.fake_services import FakeReplica, make_config, make_prompt, replicas
from tests.support import PATIENCE_S, raises, until

STAMP = PolicyStamp(version=3, digest="d" * 32)
SAMPLING = SamplingParams(temperature=1, max_tokens=10)


@contextlib.asynccontextmanager
async def serving(fakes: Sequence[FakeReplica]) -> AsyncIterator[Rollout]:
    """Yields a client whose replicas have all committed STAMP."""
    rollout = Rollout([fake.address for fake in fakes], make_config())
    try:
        await rollout.open("run", ModelCard())
        assert [replica.state for replica in rollout.replicas] == [ReplicaState.STALE] * len(fakes)
        for replica in rollout.replicas:
            await replica.commit(STAMP)
        yield rollout
    finally:
        await rollout.close()


async def generate(
    rollout: Rollout, index: int, *, num_tokens: int = 3, num_samples: int = 2, affinity: Affinity | None = None
) -> SampledGroup:
    seeds = [100 * index + sample for sample in range(num_samples)]
    return await rollout.generate(index, make_prompt(index, num_tokens), seeds, SAMPLING, STAMP, affinity)


class SpoiledReplica(FakeReplica):
    """Changes one bit of a token after the answer was sealed."""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        async for answer in super().Generate(request, context):
            answer.completions[1].tokens[0] ^= 8
            yield answer


async def test_a_token_that_changed_on_the_way_is_no_sample():
    async with replicas(1, SpoiledReplica) as fakes, serving(fakes) as rollout:
        with raises(DataLoss, reason=Reason.CORRUPT_TRANSFER):
            await generate(rollout, 0)


class RoutedReplica(FakeReplica):
    """Sends two bytes of routed experts for each sample, in messages before the group, `num_lost` of them too few."""

    num_lost = 0

    async def OpenRun(self, request: pb.OpenRunRequest, context: Any) -> pb.OpenRunResponse:
        answer = await super().OpenRun(request, context)
        answer.returns_routed_experts = request.return_routed_experts
        return answer

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        (prompt,) = request.prompts
        for part in list(to_parts([b"a%d" % index for index in range(len(prompt.seeds))]))[self.num_lost :]:
            yield seal(request, pb.GenerateResponse(prompt_id=prompt.prompt_id, stamp=STAMP, routed_experts=[part]))
        async for answer in super().Generate(request, context):
            yield answer


async def test_routes_arrive_with_their_samples():
    async with replicas(1, RoutedReplica) as fakes, serving(fakes) as rollout:
        group = await generate(rollout, 0, num_samples=3)
        assert group.routed_experts == [b"a0", b"a1", b"a2"]
        fakes[0].num_lost = 1
        with raises(InternalError):
            await generate(rollout, 1, num_samples=3)


class KeepingReplica(FakeReplica):
    """Sends two bytes of sampling masks for each sample, in messages before the group."""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        (prompt,) = request.prompts
        for part in to_parts([b"k%d" % index for index in range(len(prompt.seeds))]):
            yield seal(request, pb.GenerateResponse(prompt_id=prompt.prompt_id, stamp=STAMP, sampling_mask=[part]))
        async for answer in super().Generate(request, context):
            yield answer


async def test_kept_sets_arrive_with_their_samples_and_are_missed():
    sampling = SamplingParams(temperature=1, max_tokens=10, top_k=3, return_sampling_mask=True)
    async with replicas(1, KeepingReplica) as fakes, serving(fakes) as rollout:
        assert (await rollout.generate(0, make_prompt(0, 3), [1, 2], sampling, STAMP)).sampling_mask == [b"k0", b"k1"]
    async with replicas(1) as fakes, serving(fakes) as rollout:
        with raises(InternalError):
            await rollout.generate(0, make_prompt(0, 3), [1, 2], sampling, STAMP)


async def test_a_group_without_routes_has_none():
    async with replicas(1) as fakes, serving(fakes) as rollout:
        assert (await generate(rollout, 0)).routed_experts == []


async def test_an_engine_without_routes_is_refused_if_they_must_be_replayed():
    config = make_config(trainer={"moe": {"router_replay": "on"}})
    async with replicas(1) as fakes:
        replica = Replica(fakes[0].address, config.timeouts)
        with raises(InvalidInput, field="trainer.moe.router_replay"):
            await replica.open("run", config, ModelCard())
        await replica.close()
    async with replicas(1, RoutedReplica) as fakes:
        replica = Replica(fakes[0].address, config.timeouts)
        await replica.open("run", config, ModelCard())
        await replica.close()


async def test_a_group_goes_where_the_fewest_tokens_are_in_flight():
    async with replicas(2) as (first, second), serving([first, second]) as rollout:
        gate = asyncio.Event()
        first.before_answer = second.before_answer = lambda prompt: gate.wait()
        tasks = []
        # Tokens of two samples: 220, then 40 each.
        for index, num_tokens in enumerate([100, 10, 10, 10, 10, 10, 10, 10]):
            tasks.append(asyncio.create_task(generate(rollout, index, num_tokens=num_tokens)))
            await until(lambda: (first.in_flight + second.in_flight) == 2 * len(tasks))
        gate.set()
        await asyncio.gather(*tasks)
        # The second gets groups of 40 until it has 240; the eighth group goes to the first again.
        assert sorted(first.answered) == ["p0", "p7"]
        assert sorted(second.answered) == [f"p{index}" for index in range(1, 7)]
        assert [replica.tokens_in_flight for replica in rollout.replicas] == [0, 0]
        assert [replica.samples_in_flight for replica in rollout.replicas] == [0, 0]


async def test_no_replica_gets_more_than_it_runs_at_once_and_as_many_to_follow():
    async with replicas(2, max_samples=5) as fakes, serving(fakes) as rollout:
        # A group that is larger than the limit is sent alone.
        for num_samples, num_groups, in_flight in ((2, 20, [10, 10]), (11, 4, [11, 11])):
            gate = asyncio.Event()
            for fake in fakes:
                fake.before_answer = lambda prompt, gate=gate: gate.wait()
            tasks = [
                asyncio.create_task(generate(rollout, index, num_samples=num_samples)) for index in range(num_groups)
            ]
            await until(lambda wanted=in_flight: [fake.in_flight for fake in fakes] == wanted)
            gate.set()
            await asyncio.gather(*tasks)
            assert [fake.peak for fake in fakes] == in_flight


async def test_a_dead_replicas_groups_go_to_another():
    async with replicas(2) as (mortal, other), serving([mortal, other]) as rollout:
        mortal.before_answer = lambda prompt: asyncio.Event().wait()
        tasks = [asyncio.create_task(generate(rollout, index)) for index in range(6)]
        await until(lambda: mortal.in_flight)
        await mortal.die()
        groups = await asyncio.gather(*tasks)
        assert sorted(other.answered) == [f"p{index}" for index in range(6)]
        assert [group.index for group in groups] == list(range(6))
        assert rollout.num_redispatched > 0
        assert [replica.state for replica in rollout.replicas] == [ReplicaState.DEAD, ReplicaState.SERVING]

        mortal.before_answer = None
        await mortal.start()
        await until(lambda: rollout.replicas[0].state is ReplicaState.STALE)
        mortal.answered.clear()
        await asyncio.gather(*(generate(rollout, index) for index in range(6)))
        assert mortal.answered == []  # it has no weights yet
        await rollout.replicas[0].commit(STAMP)
        await asyncio.gather(*(generate(rollout, index) for index in range(6)))
        assert mortal.answered


async def test_when_all_are_gone_every_waiting_group_is_told():
    async with replicas(2, max_samples=2) as fakes, serving(fakes) as rollout:
        for fake in fakes:
            fake.before_answer = lambda prompt: asyncio.Event().wait()
        tasks = [asyncio.create_task(generate(rollout, index)) for index in range(8)]
        await until(lambda: all(fake.in_flight for fake in fakes))
        await asyncio.gather(*(fake.die() for fake in fakes))
        async with asyncio.timeout(PATIENCE_S):
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(outcome, Unavailable) and outcome.reason is Reason.NO_REPLICA for outcome in outcomes)


@pytest.mark.parametrize("reason", [Reason.STALE_STAMP, Reason.FUTURE_STAMP, Reason.DIGEST_MISMATCH])
async def test_a_replica_with_other_weights_is_an_error_not_a_detour(reason: Reason):
    async with replicas(2) as fakes, serving(fakes) as rollout:
        for fake in fakes:
            fake.error["Generate"] = PreconditionFailed("holds other weights", reason=reason)
        with pytest.raises(PreconditionFailed) as raised:
            await generate(rollout, 0)
        assert raised.value.reason is reason
        assert rollout.num_redispatched == 0


async def test_bad_input_is_not_sent_around():
    async with replicas(2) as fakes, serving(fakes) as rollout:
        fakes[0].error["Generate"] = InvalidInput("too long", field="prompts")
        with raises(InvalidInput, field="prompts"):
            await generate(rollout, 0)
        assert [replica.state for replica in rollout.replicas] == [ReplicaState.SERVING] * 2


@pytest.mark.parametrize("reason", [Reason.NOT_SERVING, Reason.RUN_NOT_OPEN])
async def test_a_replica_that_lost_its_weights_is_opened_again(reason: Reason):
    async with replicas(2) as (forgetful, other), serving([forgetful, other]) as rollout:
        forgetful.error["Generate"] = PreconditionFailed("nothing here", reason=reason)
        await generate(rollout, 0)
        assert other.answered == ["p0"]
        await until(lambda: forgetful.num_opens == 2)
        await until(lambda: rollout.replicas[0].state is ReplicaState.STALE)


async def test_a_replica_that_does_not_open_is_tried_again_after_longer_and_longer_pauses(monkeypatch):
    pauses: list[int] = []
    monkeypatch.setattr(replica_set, "backoff_s", lambda num_retries: pauses.append(num_retries) or 0.0)
    async with replicas(2) as (poor, other), serving([poor, other]) as rollout:
        poor.error["OpenRun"], poor.failures_left = InternalError("out of memory"), 3
        rollout.mark_dead(rollout.replicas[0], Unavailable("gone"))
        await until(lambda: rollout.replicas[0].state is ReplicaState.STALE)
        assert (pauses, poor.num_opens) == ([0, 1, 2], 2)


@pytest.mark.parametrize("kind", [InvalidInput, PermissionDenied, Unauthenticated])
async def test_a_replica_that_refuses_the_run_is_asked_once(kind: type[LockstepError], caplog, monkeypatch):
    monkeypatch.setattr(replica_set, "backoff_s", lambda num_retries: 0.0)
    async with replicas(2) as (strict, other), serving([strict, other]) as rollout:
        strict.error["OpenRun"], strict.failures_left = kind("no"), 100
        rollout.mark_dead(rollout.replicas[0], Unavailable("gone"))
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*rollout._reviving.values())
        assert strict.failures_left == 99
        assert f"cannot reopen replica {strict.address}: no" in caplog.text
        assert (await generate(rollout, 0)).index == 0


@pytest.mark.parametrize("method", ["Generate", "OpenRun"])
async def test_a_run_whose_replica_was_taken_by_another_ends(method: str):
    replaced = PreconditionFailed("run b was opened here", reason=Reason.RUN_REPLACED)
    async with replicas(2) as (taken, other), serving([taken, other]) as rollout:
        taken.error[method] = replaced
        if method == "OpenRun":  # it was restarted, or its engine closed, when the other run opened it
            rollout.mark_dead(rollout.replicas[0], Unavailable("gone"))
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(*rollout._reviving.values())
        with raises(PreconditionFailed, reason=Reason.RUN_REPLACED):
            await generate(rollout, 0)
        assert taken.num_opens == 1


async def test_a_group_whose_replica_takes_too_long_goes_to_another_and_the_engine_is_replaced():
    async with replicas(2) as (slow, other), serving([slow, other]) as rollout:
        slow.error["Generate"] = DeadlineExceeded("no answer in 3600 s")
        assert (await generate(rollout, 0)).index == 0
        assert (other.answered, rollout.num_redispatched) == (["p0"], 1)
        await until(lambda: rollout.replicas[0].state is ReplicaState.STALE)
        assert (slow.closed, slow.num_opens) == (["run"], 2)
        other.error["Generate"] = slow.error["Generate"]
        with raises(Unavailable, reason=Reason.NO_REPLICA) as raised:
            await generate(rollout, 1)
        assert f"lost replica {other.address}: no answer in 3600 s" in raised.value.message


class NewerReplica(FakeReplica):
    """Answers from the weights of the next version."""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        async for answer in super().Generate(request, context):
            answer.stamp.version += 1
            answer.ClearField("sha256")
            yield seal(request, answer)


async def test_the_answers_stamp_is_kept_not_the_requests():
    async with replicas(1, NewerReplica) as fakes, serving(fakes) as rollout:
        assert (await generate(rollout, 0)).stamp.version == STAMP.version + 1


@pytest.mark.parametrize("seed", range(5))
async def test_random_kills_lose_and_double_nothing(seed: int):
    chance = random.Random(seed)
    async with replicas(4, max_samples=6) as fakes, serving(fakes) as rollout:
        first_kill = asyncio.Event()

        async def before_answer(prompt: object) -> None:
            await first_kill.wait()
            await asyncio.sleep(chance.uniform(0, 0.06))

        for fake in fakes:
            fake.before_answer = before_answer
        tasks = [asyncio.create_task(generate(rollout, index)) for index in range(60)]
        await until(lambda: all(fake.in_flight for fake in fakes))
        for victim in chance.sample(fakes, 3):
            await victim.die()
            if chance.random() < 0.5:
                await victim.start()  # back at once, but STALE
            first_kill.set()
            await asyncio.sleep(chance.uniform(0, 0.08))  # the next is killed with any number of groups in it
        async with asyncio.timeout(PATIENCE_S):
            groups = await asyncio.gather(*tasks)
        assert rollout.num_redispatched > 0
        assert [group.index for group in groups] == list(range(60))
        for group in groups:
            assert group.prompt.prompt_id == f"p{group.index}"
            assert [completion.seed for completion in group.completions] == [100 * group.index, 100 * group.index + 1]


@pytest.mark.parametrize("change", [lambda tokens: tokens[1:], lambda tokens: [*tokens[1:], 6]], ids=["count", "hash"])
async def test_a_group_of_another_prompt_is_an_error(change: Callable[[Sequence[int]], Sequence[int]]):
    async with replicas(2) as fakes, serving(fakes) as rollout:
        assert (await generate(rollout, 0)).num_cached_tokens == 2
        for fake in fakes:
            fake.seen_prompt = change
        with raises(InternalError, reason=Reason.PROMPT_MISMATCH):
            await generate(rollout, 1)
        assert (rollout.num_redispatched, rollout.num_dead) == (0, 0)
        assert [replica.samples_in_flight for replica in rollout.replicas] == [0, 0]


async def test_an_episode_stays_with_its_replica():
    async with replicas(3) as fakes, serving(fakes) as rollout:
        gate = asyncio.Event()
        affinities = [Affinity() for _ in fakes]
        for fake in fakes:
            fake.before_answer = lambda prompt: gate.wait()
        first = [asyncio.create_task(generate(rollout, i, affinity=affinity)) for i, affinity in enumerate(affinities)]
        await until(lambda: all(fake.in_flight for fake in fakes))
        gate.set()
        await asyncio.gather(*first)
        homes = [fake.answered[0] for fake in fakes]
        # Without affinity, every later turn would go to the replica that is listed first.
        for turn in range(1, 4):
            for index, affinity in enumerate(affinities):
                await generate(rollout, 10 * turn + index, affinity=affinity)
        for fake, home in zip(fakes, homes, strict=True):
            index = int(home.removeprefix("p"))
            assert fake.answered == [f"p{10 * turn + index}" for turn in range(4)]


async def test_an_episode_waits_for_room_and_others_pass_it():
    async with replicas(2, max_samples=1) as fakes, serving(fakes) as rollout:
        affinity, gate = Affinity(), asyncio.Event()
        await generate(rollout, 0, affinity=affinity)
        (home,) = [fake for fake in fakes if fake.answered]
        (other,) = [fake for fake in fakes if fake is not home]
        home.before_answer = lambda prompt: gate.wait()
        busy = asyncio.create_task(generate(rollout, 1, affinity=affinity))
        await until(lambda: home.in_flight == 2)
        waiting = asyncio.create_task(generate(rollout, 2, affinity=affinity))
        await generate(rollout, 3)
        assert other.answered == ["p3"] and not waiting.done()
        gate.set()
        await asyncio.gather(busy, waiting)
        assert home.answered == ["p0", "p1", "p2"]


async def test_an_episode_whose_replica_dies_moves_and_stays_there():
    async with replicas(2, max_samples=1) as fakes, serving(fakes) as rollout:
        affinity = Affinity()
        await generate(rollout, 0, affinity=affinity)
        (home,) = [fake for fake in fakes if fake.answered]
        (other,) = [fake for fake in fakes if fake is not home]
        home.before_answer = lambda prompt: asyncio.Event().wait()
        # One is sampled when the replica dies, the other waits for its room.
        turns = [asyncio.create_task(generate(rollout, index, affinity=affinity)) for index in (1, 2)]
        await until(lambda: home.in_flight == 2)
        await home.die()
        await asyncio.gather(*turns)
        assert sorted(other.answered) == ["p1", "p2"]
        home.before_answer = None
        await home.start()
        gone = next(replica for replica in rollout.replicas if replica.address == home.address)
        await until(lambda: gone.state is ReplicaState.STALE)
        await gone.commit(STAMP)
        home.answered.clear()
        await generate(rollout, 3, affinity=affinity)
        assert (home.answered, other.answered[-1]) == ([], "p3")
