"""Describes Mixtral (arXiv 2401.04088)."""

from services.common.families.layers import ATTENTION, NORMS, experts
from services.common.families.record import EXPERT_KEYS, Family

FAMILY = Family(
    "mixtral",
    layer=(*ATTENTION, *experts("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2")), *NORMS),
    keys={**EXPERT_KEYS, "moe_intermediate_size": ("intermediate_size",)},
)
