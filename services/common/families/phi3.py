"""Describes Phi-3 (arXiv 2404.14219) and Phi-4 (arXiv 2412.08905).

Megatron computes only the models without a sliding window and without LongRoPE, such as the 14B Phi-4.
"""

from dataclasses import replace

from services.common.families.layers import ATTENTION_OUTPUT, DOWN, GATE_UP, NORMS, QKV
from services.common.families.record import REQUIRED, Family

FAMILY = Family(
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
)
