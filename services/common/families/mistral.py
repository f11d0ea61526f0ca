"""Describes Mistral (arXiv 2310.06825); Megatron computes only the models without a sliding window."""

from services.common.families.layers import ATTENTION, DENSE_MLP, NORMS
from services.common.families.record import Family

FAMILY = Family("mistral", layer=(*ATTENTION, *DENSE_MLP, *NORMS))
