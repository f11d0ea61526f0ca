"""Describes the dense Qwen3 models (arXiv 2505.09388)."""

from services.common.families.layers import ATTENTION, DENSE_MLP, NORMS, OPTIONAL_BIASES, QK_NORMS
from services.common.families.record import Family

FAMILY = Family(
    "qwen3", layer=(*ATTENTION, *OPTIONAL_BIASES, *QK_NORMS, *DENSE_MLP, *NORMS), flags={"attention_bias": False}
)
