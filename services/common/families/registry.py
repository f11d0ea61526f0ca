"""Describes the model families that are known, by the model_type in a model's config.json."""

from dataclasses import replace

from services.common.families.layers import (
    ATTENTION,
    ATTENTION_OUTPUT,
    DENSE_MLP,
    DOWN,
    GATE_UP,
    NORMS,
    OPTIONAL_BIASES,
    QK_NORMS,
    QKV,
    QKV_BIAS,
    experts,
    shared_expert,
)
from services.common.families.record import EXPERT_KEYS, REQUIRED, Family

_KNOWN = (
    # Llama 1 to 3 (arXiv 2302.13971, 2407.21783).
    Family("llama", layer=(*ATTENTION, *OPTIONAL_BIASES, *DENSE_MLP, *NORMS), flags={"attention_bias": False}),
    # Mistral (arXiv 2310.06825); Megatron computes only the models without a sliding window.
    Family("mistral", layer=(*ATTENTION, *DENSE_MLP, *NORMS)),
    # Mixtral (arXiv 2401.04088).
    Family(
        "mixtral",
        layer=(*ATTENTION, *experts("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2")), *NORMS),
        keys={**EXPERT_KEYS, "moe_intermediate_size": ("intermediate_size",)},
    ),
    # Phi-3 (arXiv 2404.14219) and Phi-4 (arXiv 2412.08905); Megatron computes only the models without a sliding window
    # and without LongRoPE, such as the 14B Phi-4.
    Family(
        "phi3",
        layer=(
            ATTENTION_OUTPUT,
            replace(QKV, tensors=("self_attn.qkv_proj.weight",)),
            replace(GATE_UP, tensors=("mlp.gate_up_proj.weight",)),
            DOWN,
            *NORMS,
        ),
        has_partial_rotary=True,
        required={**REQUIRED, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    ),
    # Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115).
    Family("qwen2", layer=(*ATTENTION, QKV_BIAS, *DENSE_MLP, *NORMS)),
    # Qwen1.5-MoE and Qwen2-MoE (arXiv 2407.10671): beside its experts every layer has one that computes every token.
    Family(
        "qwen2_moe",
        layer=(*ATTENTION, replace(QKV_BIAS, if_true="qkv_bias"), *experts(), *shared_expert(), *NORMS),
        keys={**EXPERT_KEYS, "shared_expert_intermediate_size": ("shared_expert_intermediate_size",)},
        flags={"qkv_bias": True},
    ),
    # The dense Qwen3 models (arXiv 2505.09388).
    Family(
        "qwen3", layer=(*ATTENTION, *OPTIONAL_BIASES, *QK_NORMS, *DENSE_MLP, *NORMS), flags={"attention_bias": False}
    ),
    # The Qwen3 models with experts in every layer (arXiv 2505.09388).
    Family(
        "qwen3_moe",
        layer=(*ATTENTION, *OPTIONAL_BIASES, *QK_NORMS, *experts(), *NORMS),
        keys=EXPERT_KEYS,
        flags={"attention_bias": False},
    ),
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _KNOWN}
