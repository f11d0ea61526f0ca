"""Describes Qwen1.5-MoE and Qwen2-MoE (arXiv 2407.10671).

Beside its experts every layer has one that computes every token.
"""

from dataclasses import replace

from services.common.families.layers import ATTENTION, NORMS, QKV_BIAS, experts, shared_expert
from services.common.families.record import EXPERT_KEYS, Family

FAMILY = Family(
    "qwen2_moe",
    layer=(*ATTENTION, replace(QKV_BIAS, if_true="qkv_bias"), *experts(), *shared_expert(), *NORMS),
    keys={**EXPERT_KEYS, "shared_expert_intermediate_size": ("shared_expert_intermediate_size",)},
    flags={"qkv_bias": True},
)
