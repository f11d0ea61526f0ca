"""Model families whose names or layers are unlike Qwen3's: published by both backends, and sampled from exactly."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.rollout_stack import Stack, completions, greedy_by_transformers, load_model
from tests.rollout.weights.test_publication import (
    LENGTH,
    MAX_LOGPROB_GAP,
    SEEDS,
    TRAINER,
    export,
    forward,
    largest_gap,
    to_batch,
    train,
)

TP = {"tensor_model_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}
LORA = {"rank": 4, "alpha": 8.0, "publish": "adapter"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("phi3", {}),
    "phi3 tp2": ("phi3", {"strategy": "megatron", "megatron": TP}),
    "phi3 adapter": ("phi3", {"strategy": "megatron", "megatron": TP, "lora": LORA}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe ep2": ("qwen2_moe", {"strategy": "megatron", "megatron": EP}),
    "qwen2_moe tp2": ("qwen2_moe", {"strategy": "megatron", "megatron": TP}),
}


@pytest.mark.parametrize("case", CASES)
async def test_an_engine_samples_as_the_trainer_computes(
    stack: Stack, model: Callable[[str], Path], tmp_path: Path, case: str
):
    kind, changes = CASES[case]
    stack = Stack(stack.trainer, stack.replicas[:1])  # test_publication.py has two
    await stack.open(model(kind), TRAINER | changes, adapter_rank=LORA["rank"] if "lora" in changes else 0)
    greedy_before = None
    for version in range(2):
        stamp = await stack.publish(version)
        expected = greedy_by_transformers(load_model(await export(stack, tmp_path / str(version))), 24)
        for replica in stack.replicas:
            assert await replica.greedy(stamp) == expected
        assert expected != greedy_before
        greedy_before = expected

        answers = await stack.replicas[0].generate(stamp, seeds=SEEDS, temperature=1.0, max_tokens=LENGTH)
        batch = to_batch(completions(answers), stamp)
        assert largest_gap(batch, await forward(stack, batch, 1.0)) <= MAX_LOGPROB_GAP
        trained = await train(stack, batch, stamp)
        assert trained.metrics["logprob_gap_max"] <= MAX_LOGPROB_GAP
