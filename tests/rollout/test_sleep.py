"""Tests Sleep and Wake of a real engine. On CPU vLLM keeps the memory, but the weights are overwritten."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytest_asyncio
from lockstep.rollout.v1 import rollout_pb2 as pb
from lockstep.rollout.v1.rollout_pb2_grpc import RolloutServiceServicer as RolloutService
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.errors import InvalidInput, Overloaded, PreconditionFailed, Reason
from services.common.rpc.fence import new_token
from services.rollout.engine import Engine
from tests.rollout.rollout_stack import MAX_MODEL_LEN, PlayedTrainer, Replica
from tests.support import PATIENCE_S, raises

WEIGHTS, KV_CACHE = pb.ENGINE_PART_WEIGHTS, pb.ENGINE_PART_KV_CACHE
_versions = itertools.count(1)


@pytest.fixture(scope="module")
def sleeper(replicas: list[Replica], model: Callable[[str], Path]) -> PlayedTrainer:
    return PlayedTrainer(model("untied"), replicas[0], "sleeper")


@pytest_asyncio.fixture
async def played(sleeper: PlayedTrainer, model: Callable[[str], Path]) -> PlayedTrainer:
    await sleeper.replica.open(model("untied"), sleeper.run_id, can_sleep=True)
    for part in (WEIGHTS, KV_CACHE):
        await sleeper.replica.wake(part)
    return sleeper


async def publish(played: PlayedTrainer) -> PolicyStamp:
    version = next(_versions)
    played.draw(seed=version)
    stamp = await played.publish(version)
    await played.assert_exact(stamp)
    return stamp


async def refused(call: Awaitable[object], reason: Reason) -> str:
    with raises(PreconditionFailed, reason=reason) as raised:
        await call
    return raised.value.message


async def test_weights_are_received_while_the_cache_sleeps_and_served_when_all_is_awake(played: PlayedTrainer):
    old = await publish(played)
    replica = played.replica
    (slept,) = (await replica.sleep()).workers
    assert slept.freed_bytes == played.plan.num_bytes
    assert (slept.taken_bytes, slept.resident_bytes, slept.device_uuid) == (0, 0, "")
    assert slept.duration_s > 0
    info = await replica.info()
    assert info.info.state == "asleep" and not info.HasField("stamp")
    await refused(replica.greedy(old), Reason.ASLEEP)
    await refused(replica.wake(KV_CACHE), Reason.ASLEEP)  # the weights come first

    played.draw(seed=7000)
    group = await played.join()
    await refused(replica.receive(played.epoch, 7000), Reason.ASLEEP)
    (woken,) = (await replica.wake(WEIGHTS)).workers
    assert (woken.taken_bytes, woken.freed_bytes) == (slept.freed_bytes, 0)
    await refused(replica.greedy(old), Reason.ASLEEP)
    sent, received = await asyncio.gather(played.send(group, 7000), replica.receive(played.epoch, 7000))
    group.abort()
    new = PolicyStamp(version=7000, digest=sent.digest)
    assert received.digest == sent.digest
    await refused(replica.commit(new), Reason.ASLEEP)  # there is no KV cache to compute with
    await replica.wake(KV_CACHE)
    await refused(replica.greedy(new), Reason.NOT_SERVING)
    await replica.commit(new)
    await played.assert_exact(new)
    await refused(replica.greedy(old), Reason.STALE_STAMP)


async def test_weights_that_were_not_published_again_after_a_sleep_are_refused(played: PlayedTrainer):
    """Tests for the fault of https://github.com/huggingface/trl/issues/5312.

    There an engine went on with what its memory had.
    """
    stamp = await publish(played)
    await played.replica.sleep()
    await played.replica.wake(WEIGHTS)
    await played.replica.wake(KV_CACHE)
    await refused(played.replica.greedy(stamp), Reason.NOT_SERVING)
    message = await refused(played.replica.commit(stamp), Reason.DIGEST_MISMATCH)
    assert "received nothing" in message
    await refused(played.replica.greedy(stamp), Reason.NOT_SERVING)
    await publish(played)


async def test_weights_received_before_a_sleep_cannot_be_committed_after_it(played: PlayedTrainer):
    await publish(played)
    group = await played.join()
    sent, _ = await asyncio.gather(played.send(group, 8000), played.replica.receive(played.epoch, 8000))
    group.abort()
    await played.replica.sleep()
    await played.replica.wake(WEIGHTS)
    await played.replica.wake(KV_CACHE)
    await refused(played.replica.commit(PolicyStamp(version=8000, digest=sent.digest)), Reason.DIGEST_MISMATCH)
    await publish(played)


async def test_repeated_calls_change_nothing(played: PlayedTrainer):
    await publish(played)
    replica = played.replica
    await replica.sleep()
    for call in (replica.sleep, replica.sleep):
        (worker,) = (await call()).workers
        assert (worker.freed_bytes, worker.taken_bytes, worker.resident_bytes) == (0, 0, 0)
    for part in (WEIGHTS, KV_CACHE):
        await replica.wake(part)
        (worker,) = (await replica.wake(part)).workers
        assert (worker.freed_bytes, worker.taken_bytes) == (0, 0) and worker.resident_bytes > 0
    stamp = await publish(played)
    await replica.wake(WEIGHTS)  # an engine that is awake goes on serving
    await played.assert_exact(stamp)


async def test_a_half_awake_engine_can_sleep_again(played: PlayedTrainer):
    await publish(played)
    await played.replica.sleep()
    await played.replica.wake(WEIGHTS)
    (worker,) = (await played.replica.sleep()).workers
    assert worker.freed_bytes > 0
    await refused(played.replica.wake(KV_CACHE), Reason.ASLEEP)
    await played.replica.wake(WEIGHTS)
    await played.replica.wake(KV_CACHE)
    await publish(played)


async def test_a_sleep_with_samples_in_flight_is_refused(played: PlayedTrainer):
    stamp = await publish(played)
    sampling = {"temperature": 1.0, "max_tokens": MAX_MODEL_LEN - 1}
    call = asyncio.create_task(played.replica.generate(stamp, [[3], [4]], seeds=range(64), **sampling))
    await played.replica.until_sampling()
    assert "in progress" in await refused(played.replica.sleep(), Reason.WRONG_STATE)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    async with asyncio.timeout(PATIENCE_S):
        while (await played.replica.info()).samples_in_flight:
            await asyncio.sleep(0.01)
    await played.assert_exact(stamp)  # and the replica still serves
    await played.replica.sleep()


async def test_only_a_run_that_was_opened_for_it_can_sleep(replicas: list[Replica], model: Callable[[str], Path]):
    await replicas[0].open(model("untied"), "awake")
    assert "can_sleep" in await refused(replicas[0].sleep(), Reason.WRONG_STATE)
    await replicas[0].client.call(RolloutService.Sleep, pb.SleepRequest(run_id="awake"), timeout_s=PATIENCE_S)
    assert (await replicas[0].info()).info.state == "idle"  # a session that takes turns needs its GPU


async def test_parts_are_named(replicas: list[Replica]):
    with raises(InvalidInput, field="part"):
        await replicas[0].wake(pb.ENGINE_PART_UNSPECIFIED)


async def test_a_caller_that_was_replaced_cannot_put_the_engine_to_sleep(played: PlayedTrainer):
    with new_token():
        await refused(played.replica.sleep(), Reason.RUN_REPLACED)
        await refused(played.replica.wake(WEIGHTS), Reason.RUN_REPLACED)


class FullDevice:
    """Plays a vLLM engine whose second worker has too little memory left; waking it anyway is an error."""

    async def collective_rpc(self, name: str, args: tuple[str, ...] = ()) -> list[dict[str, object]]:
        assert name in ("lockstep_memory", "lockstep_fit")
        fits = [{"device_uuid": f"GPU-{i}", "needed_bytes": 3 << 30, "free_bytes": (4 - 2 * i) << 30} for i in (0, 1)]
        return fits if name == "lockstep_fit" else [{}, {}]


async def test_a_part_that_does_not_fit_is_refused_with_the_numbers():
    engine = Engine(FullDevice(), SimpleNamespace(cleanup=lambda: None), lambda: None)  # type: ignore[arg-type]
    engine.asleep = frozenset(("weights", "kv_cache"))
    with raises(Overloaded, reason=Reason.OUT_OF_MEMORY) as caught:
        await engine.wake("weights")
    assert caught.value.metadata == {"device_uuid": "GPU-1", "needed_bytes": str(3 << 30), "free_bytes": str(2 << 30)}
    assert engine.asleep == {"weights", "kv_cache"}
