"""Maps LoRA targets to matrices. Megatron fuses q, k, v and gate, up; an adapter is for the fused matrix or a part."""

from collections.abc import Mapping

FUSED = {
    "linear_qkv": ("linear_q", "linear_k", "linear_v"),
    "linear_proj": ("linear_proj",),
    "linear_fc1": ("linear_fc1_gate", "linear_fc1_up"),
    "linear_fc2": ("linear_fc2",),
}
# Kind -> layer -> its parts in the order of the layer's rows. Each part has its own A and B.
PARTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "lora": {layer: (layer,) for layer in FUSED},
    "canonical_lora": FUSED,
}


def lora_layer(parameter: str) -> str | None:
    """Returns the layer, a key of FUSED, with the matrix that is Megatron's `parameter`; None if it has no adapters."""
    module, _, kind = parameter.rpartition(".")
    layer = module.rpartition(".")[2]
    return layer if kind == "weight" and layer in FUSED else None
