"""Describes the Qwen3 models with experts in every layer (arXiv 2505.09388)."""

from services.common.families.layers import ATTENTION, NORMS, OPTIONAL_BIASES, QK_NORMS, experts
from services.common.families.record import EXPERT_KEYS, Family

FAMILY = Family(
    "qwen3_moe",
    layer=(*ATTENTION, *OPTIONAL_BIASES, *QK_NORMS, *experts(), *NORMS),
    keys=EXPERT_KEYS,
    flags={"attention_bias": False},
)
