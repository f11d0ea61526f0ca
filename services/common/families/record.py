"""Defines the record of a model family.

Shapes, memory estimates, Megatron's config, the weight map and the LoRA targets all follow from the record. To add a
family, write one file like `llama` beside this one and name it in `registry`. Records are plain data, so that reading
them needs neither torch nor transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# A size is a number, or the name of one of an Architecture's sizes, such as "hidden_size".
Size = int | str

# How tensor parallelism cuts a weight. Each rank holds:
#   whole    the whole weight
#   rows     an equal share of the rows of each part; the shares are stacked
#   groups   an equal share of the key-value groups; the parts are q, k and v, and the rows of a group lie together
#   columns  an equal share of the columns; the weight has one part
Cut = Literal["whole", "rows", "groups", "columns"]


@dataclass(frozen=True)
class Weight:
    """Describes one Megatron parameter: the checkpoint tensors that it is made of, its shape, and how ranks share it.

    `parameter` is the name that Megatron's local (not TransformerEngine) layers give it. `tensors` are the checkpoint's
    names, one for each part; if there is one name for several parts, the checkpoint stacks their rows in one tensor.
    Inside a layer, all names are relative to the layer. For an expert, `{expert}` in a tensor's name stands for the
    expert's number, and `parameter` leaves the number out.
    """

    parameter: str
    tensors: tuple[str, ...]
    rows: tuple[Size, ...]
    """Number of rows of each part."""
    columns: Size | None = None
    """Number of columns; None if the weight is a vector."""
    cut: Cut = "whole"
    is_expert: bool = False
    """Whether expert parallelism distributes this weight and expert tensor parallelism cuts it."""
    if_true: str = ""
    """Key in `Family.flags`; a model has this weight only if its config sets the key to true."""

    @property
    def is_fused(self) -> bool:
        """Says whether the checkpoint stacks all parts in one tensor."""
        return len(self.rows) > len(self.tensors)


EMBEDDING = Weight(
    "embedding.word_embeddings.weight", ("model.embed_tokens.weight",), ("vocab_size",), "hidden_size", "rows"
)
FINAL_NORM = Weight("decoder.final_layernorm.weight", ("model.norm.weight",), ("hidden_size",))
OUTPUT = Weight("output_layer.weight", ("lm_head.weight",), ("vocab_size",), "hidden_size", "rows")

# Maps an Architecture's sizes to config keys; the first key that a config has is read.
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
# Maps config keys to the only value that strategy megatron accepts; a config may leave a key out.
REQUIRED: Mapping[str, object] = {
    "hidden_act": "silu",
    "sliding_window": None,
    "attention_bias": False,
    "mlp_bias": False,
}
# Sets the fields of Megatron's TransformerConfig for which config.json has no key.
SETTINGS: Mapping[str, object] = {
    "activation_func": "silu",
    "gated_linear_unit": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
}


@dataclass(frozen=True)
class Family:
    """Describes the models of one `model_type`: decoders whose layers all have the same weights."""

    model_type: str
    layer: tuple[Weight, ...]
    """Weights of one layer in the order of the checkpoint."""
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: DENSE_KEYS)
    """The Architecture's sizes that config.json must have, each with its keys there."""
    flags: Mapping[str, bool] = field(default_factory=dict[str, bool])
    """Config keys that `Weight.if_true` names, with their defaults."""
    required: Mapping[str, object] = field(default_factory=lambda: REQUIRED)
    """Config keys for which strategy megatron accepts only one value, with this value."""
    settings: Mapping[str, object] = field(default_factory=lambda: SETTINGS)
    """Fields of Megatron's TransformerConfig to set; `activation_func` names a function of torch.nn.functional."""
    has_partial_rotary: bool = False
    """Whether transformers reads `partial_rotary_factor`, and rotates only this share of each head."""
    layers: str = "model.layers"
    """Name of the list of layers in the checkpoint."""
    embedding: Weight = EMBEDDING
    final_norm: Weight = FINAL_NORM
    output: Weight = OUTPUT
    """Output layer of a model that does not tie it to the embedding."""
