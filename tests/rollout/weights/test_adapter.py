"""Tests adapters that are published beside their base.

Real Megatron ranks send them to real engines, which add the adapter themselves.
"""

import itertools
import math
from collections.abc import Callable
from pathlib import Path

from lockstep.types.v1.types_pb2 import PolicyStamp, WeightGroup, WeightPlan

from services.common.errors import InvalidInput
from tests.rollout.rollout_stack import Stack, completions
from tests.rollout.weights.test_publication import MAX_LOGPROB_DIFF, SEEDS, forward, largest_diff, to_batch, train
from tests.support import raises

RANK = 4
TRAINER = {
    "strategy": "megatron",
    "num_ranks": 2,
    "max_tokens_per_microbatch": 256,
    "max_logprob_diff": MAX_LOGPROB_DIFF,
    # An Adam step moves every entry of B, which is zero at first, by about lr: enough to change most samples.
    "optim": {"lr": 3e-2, "max_grad_norm": 1e9},
    "lora": {"rank": RANK, "alpha": 8.0, "publish": "adapter"},
    "megatron": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
}


def num_bytes(stack: Stack, *, of_base: bool) -> int:
    """Returns the size of the base's or the adapter's tensors in the plan, which are float32."""
    specs = stack.opened.plan.tensors
    are_base = [not spec.name.startswith("base_model.model.") for spec in specs]
    assert are_base == sorted(are_base, reverse=True)
    return sum(4 * math.prod(spec.shape) for spec, is_base in zip(specs, are_base, strict=True) if is_base == of_base)


async def assert_on_policy(stack: Stack, stamp: PolicyStamp) -> list[list[int]]:
    """Asserts that every member serves `stamp` and samples as the trainer computes; returns the last one's tokens."""
    tokens: list[list[int]] = []
    for replica in stack.members:
        answers = await replica.generate(stamp, seeds=SEEDS, temperature=1.0)
        assert all(answer.stamp == stamp for answer in answers)
        batch = to_batch(completions(answers), stamp)
        assert largest_diff(batch, await forward(stack, batch, 1.0)) <= MAX_LOGPROB_DIFF
        tokens = [list(completion.tokens) for completion in completions(answers)]
    return tokens


async def train_on_own_samples(stack: Stack, stamp: PolicyStamp) -> None:
    answers = await stack.members[0].generate(stamp, seeds=SEEDS, temperature=1.0)
    trained = await train(stack, to_batch(completions(answers), stamp), stamp)
    assert trained.version == stamp.version + 1


async def test_only_a_member_without_the_base_is_sent_it(stack: Stack, model: Callable[[str], Path]):
    await stack.open(model("tied"), TRAINER, adapter_rank=RANK)
    base, adapter = (num_bytes(stack, of_base=of_base) for of_base in (True, False))
    first, second = stack.replicas

    await stack.form_group([first])
    sent = await stack.send(0)
    assert sent.num_bytes == base + adapter
    stamps, samples = [sent.stamp], [await assert_on_policy(stack, sent.stamp)]

    async def publish_next(num_expected: int) -> None:
        await train_on_own_samples(stack, stamps[-1])
        sent = await stack.send(len(stamps))
        assert sent.num_bytes == num_expected
        stamps.append(sent.stamp)
        samples.append(await assert_on_policy(stack, sent.stamp))

    await publish_next(adapter)  # in the same epoch
    await stack.form_group([first])
    await publish_next(adapter)  # and in a new one of the same members
    await stack.form_group([first, second])
    await publish_next(base + adapter)  # one has nothing: both get everything
    await publish_next(adapter)
    assert len({stamp.digest for stamp in stamps}) == len(stamps)
    assert all(one != other for one, other in itertools.pairwise(samples))

    # The same weights have the same stamp, whatever each member was sent.
    sent = await stack.send(len(stamps) - 1)
    assert (sent.stamp, sent.num_bytes) == (stamps[-1], adapter)

    await first.open(model("tied"), stack.run_id, adapter_rank=RANK, max_samples=128)  # a new config needs a new engine
    assert not (await first.info()).HasField("stamp")
    await stack.form_group(stack.replicas)
    sent = await stack.send(len(stamps) - 1)
    assert (sent.stamp, sent.num_bytes) == (stamps[-1], base + adapter)
    await assert_on_policy(stack, stamps[-1])


async def test_an_engine_for_adapters_refuses_a_plan_without(stack: Stack):
    plan = WeightPlan()
    plan.CopyFrom(stack.opened.plan)
    plan.ClearField("adapter_config_json")
    group = WeightGroup(run_id=stack.run_id, epoch=stack.epoch + 1, timeout_s=1.0)
    with raises(InvalidInput, field="plan"):
        await stack.replicas[0].join(group, plan)


async def test_adapters_beside_experts_are_refused_on_cpu(stack: Stack, model: Callable[[str], Path]):
    """Tests the refusal of what would let vLLM's engine start and die at its first sample."""
    with raises(InvalidInput, field="trainer.lora.publish"):
        await stack.replicas[0].open(model("moe"), "experts", adapter_rank=RANK)
