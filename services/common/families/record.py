"""The record of a model family. Shapes, memory, Megatron's config, the weight map and LoRA targets follow from it.

A family is one file beside this one, with one such record, and a line in `registry`. Records are plain data: who reads
them needs neither torch nor transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# A number, or the name of one of an Architecture's sizes, such as "hidden_size".
Size = int | str

# What a tensor-parallel rank holds of a weight:
#   whole    all of it
#   rows     its share of each part's rows, one part below the other
#   groups   its share of key-value groups: queries, key and value of a group are together, rows of the parts q, k and v
#   columns  its share of the columns; such a weight has one part
Cut = Literal["whole", "rows", "groups", "columns"]


@dataclass(frozen=True)
class Weight:
    """A parameter of Megatron, the checkpoint tensors that it is made of, and how ranks share it.

    `parameter` is Megatron's name, that of its local layers, and `tensors` are the checkpoint's, in the order of the
    parts; a single tensor for several parts has them one below the other. Both are relative to the layer, if the weight
    is of a layer. Experts have `{expert}` in the names of their tensors, and their parameter lacks the number.
    """

    parameter: str
    tensors: tuple[str, ...]
    rows: tuple[Size, ...]
    """Rows of each part."""
    columns: Size | None = None
    """None for a vector."""
    cut: Cut = "whole"
    is_expert: bool = False
    """Held by the ranks of one expert, and cut over expert tensor parallelism."""
    if_true: str = ""
    """A config key in `Family.flags` without which a model lacks this weight."""

    @property
    def is_fused(self) -> bool:
        """Whether the checkpoint has all parts in one tensor."""
        return len(self.rows) > len(self.tensors)


EMBEDDING = Weight(
    "embedding.word_embeddings.weight", ("model.embed_tokens.weight",), ("vocab_size",), "hidden_size", "rows"
)
FINAL_NORM = Weight("decoder.final_layernorm.weight", ("model.norm.weight",), ("hidden_size",))
OUTPUT = Weight("output_layer.weight", ("lm_head.weight",), ("vocab_size",), "hidden_size", "rows")

# An Architecture's sizes and the config keys that hold them, the first that is there.
KEYS: Mapping[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers",),
    "hidden_size": ("hidden_size",),
    "num_attention_heads": ("num_attention_heads",),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": ("max_position_embeddings",),
}
DENSE_KEYS: Mapping[str, tuple[str, ...]] = {"intermediate_size": ("intermediate_size",), **KEYS}
EXPERT_KEYS: Mapping[str, tuple[str, ...]] = {
    **KEYS,
    # transformers 5 writes num_local_experts, the published Qwen3 models have num_experts.
    "num_experts": ("num_experts", "num_local_experts"),
    "num_experts_per_tok": ("num_experts_per_tok",),
    "moe_intermediate_size": ("moe_intermediate_size",),
}
# Config keys, where a config has them, and the one value that Megatron's layers compute here.
REQUIRED: Mapping[str, Any] = {"hidden_act": "silu", "sliding_window": None, "attention_bias": False, "mlp_bias": False}
# Fields of Megatron's TransformerConfig that no config.json has.
SETTINGS: Mapping[str, Any] = {
    "activation_func": "silu",
    "gated_linear_unit": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
}


@dataclass(frozen=True)
class Family:
    """All that is particular to the models of one `model_type`: decoders whose layers are all alike."""

    model_type: str
    layer: tuple[Weight, ...]
    """Of one layer, in the order of the checkpoint."""
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: DENSE_KEYS)
    """The Architecture's sizes that config.json must have, and its keys for each."""
    flags: Mapping[str, bool] = field(default_factory=dict)
    """Config keys that a weight's `if_true` names, and their defaults."""
    required: Mapping[str, Any] = field(default_factory=lambda: REQUIRED)
    """Config keys whose other values strategy megatron refuses."""
    settings: Mapping[str, Any] = field(default_factory=lambda: SETTINGS)
    """Fields of Megatron's TransformerConfig; an `activation_func` is the name of a function of torch.nn.functional."""
    layers: str = "model.layers"
    """The checkpoint's name of the list of layers."""
    embedding: Weight = EMBEDDING
    final_norm: Weight = FINAL_NORM
    output: Weight = OUTPUT
    """Of models whose output layer is not the embedding."""
