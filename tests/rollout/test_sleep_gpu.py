"""Tests Sleep and Wake of an engine on a GPU, with the shape of Qwen3-0.6B and CUDA graphs.

With `-s` it shows the bytes and seconds of each call.
The test publishes from host memory through gloo, since NCCL cannot have two members on one GPU.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from lockstep.rollout.v1 import rollout_pb2 as pb
from lockstep.types.v1.types_pb2 import DeviceMemory, PolicyStamp

from services.common.errors import Overloaded, PreconditionFailed, Reason
from services.common.weights.plan import Plan
from services.common.weights.store import ServedStore
from tests.rollout.rollout_stack import PlayedTrainer, Replica, completions, load_model
from tests.support import make_model, raises

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

KIND = "qwen3-0.6b"
WEIGHTS, KV_CACHE = pb.ENGINE_PART_WEIGHTS, pb.ENGINE_PART_KV_CACHE
GIB = 1 << 30
FRACTION = 0.5
PROMPTS = [[3 + 7 * prompt + index for index in range(40)] for prompt in range(16)]


class Publisher(PlayedTrainer):
    """Plays a trainer that publishes a bfloat16 model from host memory."""

    def __init__(self, directory: Path, replica: Replica):
        self.model, self.replica, self.run_id = load_model(directory).to(torch.bfloat16), replica, "sleeper"
        self.epoch = 0
        self._store = ServedStore("127.0.0.1")
        self.plan = Plan.of(self.weights(), bucket_bytes=256 << 20)

    def scale(self, factor: float) -> None:
        """Changes the weights so that every log-probability changes; the inverse factor gives them back exactly."""
        with torch.no_grad():
            for name, tensor in self.model.named_parameters():
                if name.endswith("model.norm.weight"):
                    tensor *= factor


@pytest_asyncio.fixture(scope="session")
async def publisher(start_replica: Callable, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Publisher]:
    directory = make_model(tmp_path_factory.mktemp("models") / KIND, KIND)
    async with start_replica() as (replica, _):
        engine = {"gpu_memory_utilization": FRACTION}
        await replica.open(directory, "sleeper", can_sleep=True, max_samples=64, engine=engine)
        yield Publisher(directory, replica)


def show(what: str, workers: Sequence[DeviceMemory]) -> DeviceMemory:
    (memory,) = workers
    sys.stdout.write(
        f"\n{what}: freed {memory.freed_bytes / GIB:.2f}, took {memory.taken_bytes / GIB:.2f} GiB in "
        f"{memory.duration_s:.3f} s, resident {memory.resident_bytes / GIB:.2f}, free "
        f"{memory.device_free_bytes / GIB:.2f} of {memory.device_total_bytes / GIB:.2f} GiB\n"
    )
    return memory


async def first_logprobs(publisher: Publisher, stamp: PolicyStamp) -> torch.Tensor:
    """Returns the log-probability of the first token that follows each prompt, [P].

    A second call for the same prompts would take their starts from the prefix cache, if that still counted.
    """
    answers = await publisher.replica.generate(stamp, PROMPTS, max_tokens=4)
    return torch.tensor([completion.logprobs[0] for completion in completions(answers)])


async def wake_and_publish(publisher: Publisher, version: int) -> tuple[PolicyStamp, int]:
    """Publishes to a sleeping engine between its two wakes, and commits.

    Returns the stamp, and the bytes of memory that the engine took.
    """
    replica = publisher.replica
    weights = show("wake weights", (await replica.wake(WEIGHTS)).workers)
    assert weights.taken_bytes >= publisher.plan.num_bytes
    group = await publisher.join()
    sent, received = await asyncio.gather(publisher.send(group, version), replica.receive(publisher.epoch, version))
    group.abort()
    assert received.digest == sent.digest
    cache = show("wake KV cache", (await replica.wake(KV_CACHE)).workers)
    stamp = PolicyStamp(version=version, digest=sent.digest)
    await replica.commit(stamp)
    return stamp, weights.taken_bytes + cache.taken_bytes


async def test_the_engine_gives_its_memory_back_and_serves_what_was_published_since(publisher: Publisher):
    stamp = await publisher.publish(1)
    wanted = await first_logprobs(publisher, stamp)
    used = torch.cuda.mem_get_info()
    slept = show("sleep", (await publisher.replica.sleep()).workers)
    assert slept.device_uuid == f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    assert slept.freed_bytes > publisher.plan.num_bytes + GIB
    assert slept.resident_bytes < GIB
    assert torch.cuda.mem_get_info()[0] - used[0] == pytest.approx(slept.freed_bytes, rel=0.05)
    (again,) = (await publisher.replica.sleep()).workers
    assert again.freed_bytes == again.taken_bytes == 0
    for call, reason in (
        (publisher.replica.greedy(stamp), Reason.ASLEEP),
        (publisher.replica.wake(KV_CACHE), Reason.ASLEEP),
    ):
        with raises(PreconditionFailed, reason=reason):
            await call
    for version in range(2, 8):  # a recorded reload, a checked one, direct copies
        factor = 0.5 if version % 2 == 0 else 2.0
        publisher.scale(factor)
        stamp, taken_bytes = await wake_and_publish(publisher, version)
        # What the engine computes in while it serves is freed too, but taken only when it is needed again.
        assert 0 <= slept.freed_bytes - taken_bytes < 2 * GIB
        logprobs = await first_logprobs(publisher, stamp)
        if factor == 0.5:
            assert (logprobs - wanted).abs().max() > 0.1  # the weights differ, and it shows
        else:  # no stale prefix cache was used, and CUDA graphs read the new weights
            torch.testing.assert_close(logprobs, wanted, rtol=0, atol=0.05)
        slept = show("sleep", (await publisher.replica.sleep()).workers)


async def test_weights_that_were_not_published_again_after_a_sleep_are_refused(publisher: Publisher):
    await publisher.replica.sleep()
    stamp, _ = await wake_and_publish(publisher, 100)
    await publisher.replica.sleep()
    await publisher.replica.wake(WEIGHTS)
    await publisher.replica.wake(KV_CACHE)
    for call, reason in (
        (publisher.replica.greedy(stamp), Reason.NOT_SERVING),
        (publisher.replica.commit(stamp), Reason.DIGEST_MISMATCH),
    ):
        with raises(PreconditionFailed, reason=reason):
            await call


async def test_a_cache_that_does_not_fit_is_refused_with_the_numbers_and_can_be_woken_later(publisher: Publisher):
    await publisher.replica.sleep()
    await publisher.replica.wake(WEIGHTS)
    other = torch.empty(torch.cuda.mem_get_info()[0] - 2 * GIB, dtype=torch.uint8, device="cuda")
    with raises(Overloaded, reason=Reason.OUT_OF_MEMORY):
        await publisher.replica.wake(KV_CACHE)
    del other
    torch.cuda.empty_cache()
    await publisher.replica.wake(KV_CACHE)
    stamp = await publisher.publish(200)
    assert torch.isfinite(await first_logprobs(publisher, stamp)).all()
