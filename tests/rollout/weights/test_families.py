"""Publishes model families with other names or layers than Qwen3's from both backends, and compares the samples."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from lockstep.rollout.v1 import rollout_pb2 as pb

from services.common.routed_experts import from_parts, routed_experts_shape
from tests.rollout.rollout_stack import GREEDY_TOKENS, PROMPTS, Stack, completions, greedy_by_transformers, load_model
from tests.rollout.weights.test_publication import (
    LENGTH,
    MAX_LOGPROB_DIFF,
    SEEDS,
    TRAINER,
    export,
    forward,
    largest_diff,
    to_batch,
    train,
)
from tests.trainer.harness_processes import marked

TP = {"tensor_model_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}
PP = {"pipeline_model_parallel_size": 2}
# Longer than a block of vLLM's prefix cache, so that the samples of a prompt share a block.
LONG_PROMPTS = [[2 + (i * j) % 60 for j in range(140)] for i in (3, 7)]
# vLLM has no prefix cache for latent attention on CPU.
UNCACHED = ("deepseek_v3",)
LORA = {"rank": 4, "alpha": 8.0, "publish": "adapter"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("phi3", {}),
    "phi3 tp2": ("phi3", {"strategy": "megatron", "megatron": TP}),
    "phi3 adapter": ("phi3", {"strategy": "megatron", "megatron": TP, "lora": LORA}),
    "deepseek_v3 tp2": ("deepseek_v3", {"strategy": "megatron", "megatron": TP}),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss tp2": ("gpt_oss", {"strategy": "megatron", "megatron": TP}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe ep2": ("qwen2_moe", {"strategy": "megatron", "megatron": EP}),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe pp2": ("glm4_moe", {"strategy": "megatron", "megatron": PP}),
    "qwen2_moe tp2": ("qwen2_moe", {"strategy": "megatron", "megatron": TP}),
}


# The cases of FSDP are long tests: a Megatron layout of the same family covers what FSDP sends, and tests/trainer
# compares that with transformers. Of the others, pipelines are sent in tests/e2e too, and adapters in test_adapter.py.
LONG = ["phi3 tp2", "phi3 adapter", "glm4_moe pp2", "qwen2_moe tp2", *(name for name in CASES if " " not in name)]


@pytest.mark.parametrize("case", marked(CASES, LONG))
async def test_an_engine_samples_as_the_trainer_computes(
    stack: Stack, model: Callable[[str], Path], tmp_path: Path, case: str
):
    kind, changes = CASES[case]
    is_routed = routed_experts_shape((model(kind) / "config.json").read_bytes()) is not None
    rank = LORA["rank"] if "lora" in changes else 0
    stack = Stack(stack.trainer, stack.replicas[:1])  # test_publication.py has two replicas
    await stack.open(model(kind), TRAINER | changes, adapter_rank=rank, return_routed_experts=is_routed)
    greedy_before = None
    for version in range(2):
        stamp = await stack.publish(version)
        expected = greedy_by_transformers(load_model(await export(stack, tmp_path / str(version))), GREEDY_TOKENS)
        for replica in stack.replicas:
            assert await replica.greedy(stamp) == expected
        assert expected != greedy_before
        greedy_before = expected

        prompts = LONG_PROMPTS if version else PROMPTS
        sampling = {"temperature": 1.0, "max_tokens": LENGTH, "return_routed_experts": True}
        answers = await stack.replicas[0].generate(stamp, prompts, seeds=SEEDS, **sampling)
        assert (version > 0 and kind not in UNCACHED) == any(answer.num_cached_tokens for answer in answers)
        batch = routed(to_batch(completions(answers), stamp, prompts), answers)
        assert batch["routed_experts"].null_count == (0 if is_routed else batch.num_rows)
        assert largest_diff(batch, await forward(stack, batch, 1.0)) <= MAX_LOGPROB_DIFF
        trained = await train(stack, batch, stamp)
        assert trained.metrics["logprob_diff_max"] <= MAX_LOGPROB_DIFF
        if is_routed:
            # All tokens are replayed, also those that the engine took from its prefix cache. In float32 the trainer's
            # routers choose the same experts, so routed experts of other rows or layers would show.
            num_tokens = pc.sum(pc.list_value_length(batch["prompt_tokens"])).as_py() + batch.num_rows * (LENGTH - 1)
            assert trained.metrics["moe_replayed_tokens"] == num_tokens
            assert trained.metrics["moe_router_agreement"] == 1.0
    if is_routed:
        other = routed(batch, answers, change=lambda routed_experts: bytes(3 - expert for expert in routed_experts))
        assert largest_diff(batch, await forward(stack, other, 1.0)) > 100 * MAX_LOGPROB_DIFF


def routed(batch: pa.Table, answers: Sequence[pb.GenerateResponse], change: Callable = bytes) -> pa.Table:
    """Returns the batch with the routed experts of its samples, each passed through `change`; without any if there are
    none."""
    routed_experts = [change(one) for answer in answers for one in from_parts(answer.routed_experts, len(SEEDS))]
    index = batch.schema.get_field_index("routed_experts")
    return batch.set_column(
        index, batch.schema.field(index), pa.array(routed_experts or [None] * batch.num_rows, pa.large_binary())
    )
