"""The weights of layers: how Megatron and checkpoints name them, their shapes, and how ranks share them."""

from dataclasses import dataclass, replace
from typing import Literal

# A size is a number, or the name of one of an Architecture's sizes, such as "hidden_size".
Size = int | str

# How tensor parallelism cuts a weight. Each rank holds:
#   whole    the whole weight
#   rows     an equal share of the rows of each part; the shares are stacked
#   groups   an equal share of the key-value groups; the parts are q, k and v, and the rows of a group lie together
#   columns  an equal share of the columns; the weight has one part
# Of a stacked weight this is how the matrix of each expert is cut.
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
    is_stacked: bool = False
    """Whether the parameter, and the checkpoint's tensor, stacks this weight of all experts: its first axis counts
    them. Expert parallelism does not distribute such a weight."""
    if_true: str = ""
    """Key in `Family.flags`; a model has this weight only if its config sets the key to true."""

    @property
    def is_fused(self) -> bool:
        """Whether the checkpoint stacks all parts in one tensor."""
        return len(self.rows) > len(self.tensors)

    @property
    def is_linear(self) -> bool:
        """Whether it is the matrix of one of a layer's linear products, which can be computed in float8."""
        return "linear_" in self.parameter and self.columns is not None


EMBEDDING = Weight(
    "embedding.word_embeddings.weight", ("model.embed_tokens.weight",), ("vocab_size",), "hidden_size", "rows"
)
FINAL_NORM = Weight("decoder.final_layernorm.weight", ("model.norm.weight",), ("hidden_size",))
OUTPUT = Weight("output_layer.weight", ("lm_head.weight",), ("vocab_size",), "hidden_size", "rows")

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
# RMS norms over each head of the queries and of the keys.
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
# Norms before attention, and before the feed-forward layer.
NORMS = (
    Weight("input_layernorm.weight", ("input_layernorm.weight",), ("hidden_size",)),
    Weight("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), ("hidden_size",)),
)
# Norms of the outputs of attention and of the feed-forward layer, which are before both in the other families.
OUTPUT_NORMS = (
    Weight("self_attn_bda.norm.weight", ("post_attention_layernorm.weight",), ("hidden_size",)),
    Weight("mlp_bda.norm.weight", ("post_feedforward_layernorm.weight",), ("hidden_size",)),
)
# RMS norms over all heads together.
ALL_HEADS_NORMS = (
    Weight("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), ("query_size",), cut="rows"),
    Weight("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), ("key_value_size",), cut="rows"),
)

ATTENTION = (QKV, ATTENTION_OUTPUT)
# Multi-head latent attention (arXiv 2405.04434): queries are expanded from one latent vector, and keys and values from
# another. Without a latent of the queries, one matrix makes them.
LATENT_ATTENTION = (
    Weight(
        "self_attention.linear_q_proj.weight",
        ("self_attn.q_proj.weight",),
        ("direct_query_size",),
        "hidden_size",
        "rows",
    ),
    Weight("self_attention.linear_q_down_proj.weight", ("self_attn.q_a_proj.weight",), ("q_lora_rank",), "hidden_size"),
    Weight("self_attention.q_layernorm.weight", ("self_attn.q_a_layernorm.weight",), ("q_lora_rank",)),
    Weight(
        "self_attention.linear_q_up_proj.weight", ("self_attn.q_b_proj.weight",), ("query_size",), "q_lora_rank", "rows"
    ),
    Weight(
        "self_attention.linear_kv_down_proj.weight",
        ("self_attn.kv_a_proj_with_mqa.weight",),
        ("latent_size",),
        "hidden_size",
    ),
    Weight("self_attention.kv_layernorm.weight", ("self_attn.kv_a_layernorm.weight",), ("kv_lora_rank",)),
    Weight(
        "self_attention.linear_kv_up_proj.weight",
        ("self_attn.kv_b_proj.weight",),
        ("expanded_size",),
        "kv_lora_rank",
        "rows",
    ),
    replace(ATTENTION_OUTPUT, columns="value_size"),
)
# A model has these if its config says `attention_bias`.
OPTIONAL_BIASES = tuple(replace(weight, if_true="attention_bias") for weight in (QKV_BIAS, ATTENTION_OUTPUT_BIAS))
DENSE_MLP = (GATE_UP, DOWN)


def experts(
    router: str = "mlp.gate",
    expert: str = "mlp.experts",
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> tuple[Weight, ...]:
    """Returns the weights of the router and the experts; `parts` are the checkpoint's names of gate, up and down."""
    gate, up, down = (f"{expert}.{{expert}}.{part}.weight" for part in parts)
    width = "moe_intermediate_size"
    return (
        Weight("mlp.router.weight", (f"{router}.weight",), ("num_experts",), "hidden_size"),
        replace(
            GATE_UP, parameter="mlp.experts.linear_fc1.weight", tensors=(gate, up), rows=(width, width), is_expert=True
        ),
        replace(DOWN, parameter="mlp.experts.linear_fc2.weight", tensors=(down,), columns=width, is_expert=True),
    )


# A logit of each head, of a key without value (gpt-oss, arXiv 2508.10925).
SINKS = Weight(
    "self_attention.core_attention.softmax_offset", ("self_attn.sinks",), ("num_attention_heads",), cut="rows"
)


def _stacked(name: str, rows: Size, columns: Size | None, cut: Cut) -> Weight:
    parameter, tensors = f"mlp.experts.{name}", (f"mlp.experts.{name}",)
    return Weight(parameter, tensors, (rows,), columns, cut, is_expert=True, is_stacked=True)


# The matrices of all experts in one tensor, transposed, and their biases. Columns of gate and up alternate.
STACKED_EXPERTS = (
    _stacked("gate_up_proj", "hidden_size", "gate_up_size", "columns"),
    _stacked("gate_up_proj_bias", "gate_up_size", None, "rows"),
    _stacked("down_proj", "moe_intermediate_size", "hidden_size", "rows"),
    _stacked("down_proj_bias", "hidden_size", None, "whole"),
)

ROUTER_BIAS = Weight("mlp.router.bias", ("mlp.router.bias",), ("num_experts",))

# Added to the scores of the experts when a token chooses them, but not to their weights. It is not trained.
CORRECTION_BIAS = Weight("mlp.router.expert_bias", ("mlp.gate.e_score_correction_bias",), ("num_experts",))


def shared_expert(name: str) -> tuple[Weight, ...]:
    """Returns the weights of the expert `name` that computes every token."""
    width = "shared_expert_intermediate_size"
    gate_up = tuple(f"{name}.{part}.weight" for part in ("gate_proj", "up_proj"))
    return (
        replace(GATE_UP, parameter="mlp.shared_experts.linear_fc1.weight", tensors=gate_up, rows=(width, width)),
        replace(
            DOWN, parameter="mlp.shared_experts.linear_fc2.weight", tensors=(f"{name}.down_proj.weight",), columns=width
        ),
    )


# Its sigmoid, one number for each token, is multiplied with the output of the shared expert.
SHARED_EXPERT_GATE = Weight("mlp.shared_experts.gate_weight", ("mlp.shared_expert_gate.weight",), (1,), "hidden_size")
