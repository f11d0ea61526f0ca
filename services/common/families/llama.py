"""Describes Llama 1 to 3 (arXiv 2302.13971, 2407.21783)."""

from services.common.families.layers import ATTENTION, DENSE_MLP, NORMS, OPTIONAL_BIASES
from services.common.families.record import Family

FAMILY = Family("llama", layer=(*ATTENTION, *OPTIONAL_BIASES, *DENSE_MLP, *NORMS), flags={"attention_bias": False})
