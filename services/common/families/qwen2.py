"""Describes Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115)."""

from services.common.families.layers import ATTENTION, DENSE_MLP, NORMS, QKV_BIAS
from services.common.families.record import Family

FAMILY = Family("qwen2", layer=(*ATTENTION, QKV_BIAS, *DENSE_MLP, *NORMS))
