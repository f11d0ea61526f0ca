"""Weights that most families share, under the checkpoint names that most of them use."""

from dataclasses import replace

from services.common.families.record import Weight

QKV = Weight(
    "self_attention.linear_qkv.weight",
    ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    rows=("query_size", "key_value_size", "key_value_size"),
    columns="hidden_size",
    cut="groups",
)
QKV_BIAS = replace(
    QKV,
    parameter="self_attention.linear_qkv.bias",
    tensors=("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    columns=None,
)
ATTENTION_OUTPUT = Weight(
    "self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), ("hidden_size",), "query_size", "columns"
)
ATTENTION_OUTPUT_BIAS = Weight("self_attention.linear_proj.bias", ("self_attn.o_proj.bias",), ("hidden_size",))
# RMS norms of each head of the queries and the keys.
QK_NORMS = (
    Weight("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), ("head_dim",)),
    Weight("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), ("head_dim",)),
)
GATE_UP = Weight(
    "mlp.linear_fc1.weight",
    ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    rows=("intermediate_size", "intermediate_size"),
    columns="hidden_size",
    cut="rows",
)
DOWN = Weight("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), ("hidden_size",), "intermediate_size", "columns")
# Before attention, and before the feed-forward layer.
NORMS = (
    Weight("input_layernorm.weight", ("input_layernorm.weight",), ("hidden_size",)),
    Weight("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), ("hidden_size",)),
)

ATTENTION = (QKV, ATTENTION_OUTPUT)
# Where the config key `attention_bias` decides.
OPTIONAL_BIASES = tuple(replace(weight, if_true="attention_bias") for weight in (QKV_BIAS, ATTENTION_OUTPUT_BIAS))
DENSE_MLP = (GATE_UP, DOWN)


def experts(
    router: str = "mlp.gate",
    expert: str = "mlp.experts",
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> tuple[Weight, ...]:
    """The router and the experts by their checkpoint names; `parts` are those of gate, up and down of an expert."""
    gate, up, down = (f"{expert}.{{expert}}.{part}.weight" for part in parts)
    width = "moe_intermediate_size"
    return (
        Weight("mlp.router.weight", (f"{router}.weight",), ("num_experts",), "hidden_size"),
        replace(
            GATE_UP, parameter="mlp.experts.linear_fc1.weight", tensors=(gate, up), rows=(width, width), is_expert=True
        ),
        replace(DOWN, parameter="mlp.experts.linear_fc2.weight", tensors=(down,), columns=width, is_expert=True),
    )
