"""Defines the cases of `benchmarks.train`: SkyRL's workload, the settings of each case, and its operation count."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.lengths import PROMPT_TOKENS, read_lengths
from benchmarks.megatron_layouts import BF16_GRADIENTS, EP
from services.common.batches import SAMPLE_SCHEMA
from services.common.config.trainer import TrainerConfig
from services.common.families.architecture import Architecture

GROUP = 5  # completions per prompt


@dataclass(frozen=True)
class Workload:
    """Holds a model's mean completion length, targets on 8 GPUs, and SkyRL's seconds and GPUs by strategy.

    Source: SkyRL, docs/content/docs/examples/megatron.mdx, Search-R1 on H100s. SkyRL's train is the
    updates, and its forward is the reference's forward and the policy's forward before the batch.
    """

    mean_tokens: int
    train_target_s: float
    forward_target_s: float
    skyrl: dict[str, tuple[float, float, int]]


WORKLOADS = {
    "qwen2.5-3b": Workload(658, 13, 8, {"megatron": (48, 39, 8), "fsdp": (42, 28, 8)}),
    "qwen2.5-7b": Workload(819, 35, 19, {"megatron": (93, 46, 8), "fsdp": (100, 33, 8)}),
    "qwen3-30b-a3b": Workload(1158, 97, 60, {"megatron": (189, 145, 32)}),
    # For two GPUs and for one: a third and a sixth of the layers and targets of the model above.
    "qwen3-a3b-16-layers": Workload(1158, 97 / 3, 60 / 3, {}),
    "qwen3-a3b-8-layers": Workload(1158, 97 / 6, 60 / 6, {}),
}


@dataclass(frozen=True)
class Case:
    """Describes a model on some GPUs. Without `has_reference`, the forward uses the policy's weights to save memory."""

    model: str
    world: int
    strategy: str
    max_tokens: int
    trainer: dict[str, Any] = field(default_factory=dict)
    has_reference: bool = True

    @property
    def config(self) -> TrainerConfig:
        """Returns settings for two optimizer updates with a KL penalty and recomputed old log-probabilities."""
        settings = {
            "strategy": self.strategy,
            "num_ranks": self.world,
            "max_tokens_per_microbatch": self.max_tokens,
            "num_minibatches": 2,
            "max_logprob_diff": 1e9,  # weights and log-probabilities are random
            "collective_timeout_s": 180,
            "loss": {"kl_coef": 0.001},
        }
        return TrainerConfig.model_validate(settings | self.trainer).for_steps(None)


_RECOMPUTE: dict[str, Any] = {"gradient_checkpointing": True}
# Faster than the default if there is enough memory.
_GATHERED: dict[str, Any] = {"fsdp": {"reshard_after_forward": False}}
# Micro-batch size in tokens whose activations fit into memory without recompute.
_MAX_TOKENS = {
    ("qwen2.5-3b", "megatron"): 16384,
    ("qwen2.5-3b", "fsdp"): 8192,
    ("qwen2.5-7b", "megatron"): 6144,
    ("qwen2.5-7b", "fsdp"): 6144,
}


# Minimum number of GPUs for weights, gradients, optimizer states and a reference.
_FEWEST_GPUS = {"qwen2.5-3b": 1, "qwen2.5-7b": 2}


def cases() -> Iterator[tuple[str, Case]]:
    """Yields the name of each case and the case, for all numbers of GPUs, the largest first."""
    for world in (8, 4, 2, 1):
        for (model, strategy), max_tokens in _MAX_TOKENS.items():
            if world < _FEWEST_GPUS[model]:
                continue
            name = f"{model} {strategy} {world} GPUs"
            yield name, Case(model, world, strategy, max_tokens)
            if strategy == "fsdp":
                yield f"{name} tuned", Case(model, world, strategy, max_tokens, _GATHERED)
            yield f"{name} recompute", Case(model, world, strategy, 16384, _RECOMPUTE)
        yield from _experts(world)


def _experts(world: int) -> Iterator[tuple[str, Case]]:
    """Yields cases of Qwen3-30B-A3B. 4 GPUs need gradients and states below float32, and cannot hold a reference."""
    if world == 1:
        model = "qwen3-a3b-8-layers"
        router = {"megatron": {"transformer_config_kwargs": {"moe_router_fusion": True}}}
        yield f"{model} megatron 1 GPUs", Case(model, world, "megatron", 28672, has_reference=False)
        yield f"{model} megatron 1 GPUs fused router", Case(model, world, "megatron", 28672, router, False)
        yield f"{model} megatron 1 GPUs recompute", Case(model, world, "megatron", 32768, _RECOMPUTE, False)
        return
    if world == 2:
        model, experts = "qwen3-a3b-16-layers", {"megatron": {EP: world}}
        yield f"{model} megatron 2 GPUs", Case(model, world, "megatron", 16384, experts, False)
        yield f"{model} megatron 2 GPUs recompute", Case(model, world, "megatron", 32768, _RECOMPUTE | experts, False)
        return
    name, model = f"qwen3-30b-a3b megatron {world} GPUs", "qwen3-30b-a3b"
    plain = {EP: world, **(BF16_GRADIENTS if world == 4 else {})}
    trainer = _RECOMPUTE | {"megatron": plain}
    yield f"{name} recompute", Case(model, world, "megatron", 16384 if world == 8 else 8192, trainer, world == 8)
    if world == 8:
        yield name, Case(model, world, "megatron", 4096, {"megatron": plain})


def sample_lengths(model: str, num_samples: int, *, is_tiny: bool) -> np.ndarray:
    """Returns the lengths in tokens of prompts and completions, [samples, 2]."""
    completions = np.array(read_lengths(WORKLOADS[model].mean_tokens, num_samples))
    lengths = np.stack([np.full(num_samples, PROMPT_TOKENS), completions], 1)
    return lengths // 32 + 1 if is_tiny else lengths


def make_samples(lengths: np.ndarray, vocab_size: int) -> pa.Table:
    """Returns random tokens and advantages in groups of `GROUP`, with log-probabilities of a uniform distribution."""
    random, num_samples = np.random.default_rng(0), len(lengths)
    prompts, completions = lengths.T

    def rows(counts: np.ndarray, values: np.ndarray, dtype: type) -> pa.Array:
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.astype(dtype)))

    num_tokens = int(completions.sum())
    uniform = rows(completions, np.full(num_tokens, -np.log(vocab_size)), np.float32)
    columns = {
        "prompt_id": pa.array([str(index // GROUP) for index in range(num_samples)]),
        "group": pa.array(np.arange(num_samples, dtype=np.int32) // GROUP),
        "sample": pa.array(np.arange(num_samples, dtype=np.int32) % GROUP),
        "prompt_tokens": rows(prompts, random.integers(0, vocab_size, prompts.sum()), np.uint32),
        "tokens": rows(completions, random.integers(0, vocab_size, num_tokens), np.uint32),
        "logprobs": uniform,
        "ref_logprobs": uniform,
        "advantages": rows(completions, random.normal(size=num_tokens), np.float32),
    }
    missing = {name: pa.nulls(num_samples, SAMPLE_SCHEMA.field(name).type) for name in SAMPLE_SCHEMA.names}
    return pa.table(missing | columns)


def active_parameters(model: Architecture) -> int:
    """Returns the number of weights that each token is multiplied with.

    That includes the output layer and the chosen experts, but not the embedding, unless it is tied to the output layer.
    """
    experts = sum(map(model.expert_parameters, range(model.num_layers)))  # one in each layer
    lookup = 0 if model.tie_word_embeddings else model.embedding_parameters()
    return model.num_parameters - lookup - (model.num_experts - model.num_experts_per_tok) * experts


def forward_operations(model: Architecture, lengths: Sequence[int]) -> float:
    """Returns the floating-point operations of a forward pass over sequences of `lengths` tokens; an update takes 3x.

    They are 2 N tokens + L (A + O) sum(length^2), with N active parameters, L layers, and A and O the widths of all
    heads' queries and outputs. The first term is the products with the weights. The second is the two products of
    causal attention, 2 (A + O) length^2 per layer, half of which is masked (as in arXiv 2204.02311, appendix B, which
    does not subtract the masked half).
    Prompt tokens count fully, although the output layer is not computed for them.
    """
    tokens = np.array(lengths, np.float64)
    widths = model.query_size + model.attention_sizes[-1]
    attention = model.num_layers * widths * float((tokens**2).sum())
    return 2 * active_parameters(model) * float(tokens.sum()) + attention
