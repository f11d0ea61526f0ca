"""Defines the models, layouts and samples of `benchmarks.megatron`."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from services.common.batches import SAMPLE_SCHEMA

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
VPP = "virtual_pipeline_model_parallel_size"
_QWEN3 = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "initializer_range": 0.04,
    "tie_word_embeddings": True,
}
_A3B = _QWEN3 | {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
_QWEN25_3B = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
_QWEN25_7B = _QWEN25_3B | {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
_SMOLLM2_135M = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
# Layers of the sizes of published models, and few of them, with a layer of each kind; strategy fsdp only.
_GPT_OSS_20B = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 2,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
_GEMMA_3_4B = {
    "vocab_size": 262208,
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 1024,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "max_position_embeddings": 131072,
}
_DEEPSEEK_V3 = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "max_position_embeddings": 4096,
}
_QWEN_3_5 = {
    "vocab_size": 248320,
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "max_position_embeddings": 32768,
}
TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 4}
_8B = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm2-135m": ("llama", _SMOLLM2_135M),
    "qwen3-8b": ("qwen3", _QWEN3 | _8B | {"tie_word_embeddings": False}),
    "qwen3-0.6b": ("qwen3", _QWEN3),
    "qwen3-a3b-4-layers": ("qwen3_moe", _A3B | {"num_hidden_layers": 4, "num_experts": 32}),
    "qwen3-a3b-8-layers": ("qwen3_moe", _A3B | {"num_hidden_layers": 8}),
    "qwen3-a3b-16-layers": ("qwen3_moe", _A3B | {"num_hidden_layers": 16}),
    "qwen2.5-3b": ("qwen2", _QWEN25_3B),
    "qwen2.5-7b": ("qwen2", _QWEN25_7B),
    "gpt-oss-20b-2-layers": ("gpt_oss", _GPT_OSS_20B),
    "gemma-3-4b-6-layers": ("gemma3_text", _GEMMA_3_4B),
    "deepseek-v3-2-layers": ("deepseek_v3", _DEEPSEEK_V3),
    "qwen3.5-4-layers": ("qwen3_5", {"text_config": _QWEN_3_5, "vision_config": {"depth": 1, "out_hidden_size": 2560}}),
    "qwen3-30b-a3b": ("qwen3_moe", _A3B | {"num_hidden_layers": 48}),
}
# Four GPUs have no room for float32 gradients of 30 B weights, and for float32 weights in addition to bfloat16 ones.
BF16_GRADIENTS: dict[str, Any] = {
    "ddp_config": {"grad_reduce_in_fp32": False},
    "optimizer_config_kwargs": {"use_precision_aware_optimizer": True, "main_grads_dtype": "bf16"},
    "fully_reshardable": False,
}


@dataclass(frozen=True)
class Layout:
    """Describes a layout: model, ranks, Megatron settings, other trainer settings, and a checkpoint to save or load.

    `like` identifies layouts that train the same weights, whose gradient norms are compared.
    """

    model: str
    world: int
    megatron: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    saves: bool = False
    loads: bool = False

    @property
    def like(self) -> str:
        return self.model + str(self.trainer.get("lora", ""))


def layouts() -> Iterator[tuple[str, Layout]]:
    """Yields the name of each layout and the layout. The first layout of each model is on one GPU."""
    dense: list[tuple[int, dict[str, Any]]] = [
        (1, {}),
        (1, {"packed_sequences": False}),
        (1, {"auto_offload": True}),
        (2, {TP: 2}),
        (2, {PP: 2}),
        (2, {CP: 2}),
        (2, {}),
        (4, {TP: 4}),
        (4, {CP: 4}),
        (4, {TP: 2, PP: 2}),
        (4, {TP: 2, CP: 2}),
        (4, {PP: 2, VPP: 2}),
        (4, {TP: 2, "ddp_config": {"overlap_grad_reduce": True, "overlap_param_gather": True}}),
    ]
    experts = [
        (1, {}),
        (2, {EP: 2}),
        (2, {TP: 2, EP: 2, ETP: 1}),
        (4, {EP: 4}),
        (4, {EP: 2, PP: 2}),
        (4, {CP: 2, EP: 4}),
        (4, {TP: 2, EP: 2, ETP: 2}),
    ]
    for model, table in (("qwen3-a3b-4-layers", experts), ("qwen3-0.6b", dense)):
        for world, megatron in table:
            yield f"{model} {_describe(world, megatron)}", Layout(model, world, megatron)
    yield "qwen3-0.6b 1 GPUs saves", Layout("qwen3-0.6b", 1, saves=True)
    yield "qwen3-0.6b 2 GPUs TP2 loads", Layout("qwen3-0.6b", 2, {TP: 2}, loads=True)
    yield "qwen3-0.6b 2 GPUs PP2 loads", Layout("qwen3-0.6b", 2, {PP: 2}, loads=True)
    lora = {"lora": {"rank": 16, "kind": "canonical_lora"}}
    for world, megatron in ((1, {}), (2, {TP: 2})):
        yield f"qwen3-0.6b LoRA {_describe(world, megatron)}", Layout("qwen3-0.6b", world, megatron, lora)
    recompute = {"gradient_checkpointing": True, "max_tokens_per_microbatch": 4096}
    large = {EP: 4, **BF16_GRADIENTS}
    yield "qwen3-30b-a3b 4 GPUs EP4", Layout("qwen3-30b-a3b", 4, large, recompute)


def samples(vocab_size: int) -> pa.Table:
    """Returns 8 groups of 4 samples with prompts of 64 to 128 random tokens and completions of 128 to 512."""
    random = np.random.default_rng(0)
    rows = []
    for index in range(32):
        tokens = random.integers(0, vocab_size, random.integers(128, 513)).tolist()
        rows.append(
            {
                "prompt_id": f"p{index // 4}",
                "group": index // 4,
                "sample": index % 4,
                "prompt_tokens": random.integers(0, vocab_size, random.integers(64, 129)).tolist(),
                "tokens": tokens,
                "logprobs": [-float(np.log(vocab_size))] * len(tokens),
                "reward": 0.0,
                "components": [],
                "advantages": [float(random.normal())] * len(tokens),
                "finish_reason": "stop",
                "policy_version": 0,
                "policy_digest": "",
                "scorer": "",
                "seed": 0,
            }
        )
    return pa.Table.from_pylist(rows, schema=SAMPLE_SCHEMA)


def _describe(world: int, megatron: dict[str, Any]) -> str:
    short = {TP: "TP", PP: "PP", CP: "CP", EP: "EP", VPP: "VPP", ETP: "ETP"}
    words = [f"{short[key]}{value}" if key in short else key for key, value in megatron.items()]
    return " ".join([f"{world} GPUs", *words])
