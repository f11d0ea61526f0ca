"""The known model families, by the model_type in a model's config.json, and the matrices that can have adapters."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
        """Whether the checkpoint stacks all parts in one tensor."""
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
LATENT_KEYS: Mapping[str, tuple[str, ...]] = {
    name: (name,) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
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
    """The models of one `model_type`: decoders whose layers all have the same weights."""

    model_type: str
    layer: tuple[Weight, ...]
    """Weights of one layer in the order of the checkpoint."""
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: DENSE_KEYS)
    """The Architecture's sizes that config.json must have, each with its keys there."""
    nullable: tuple[str, ...] = ()
    """The Architecture's sizes that config.json must have under the same name, where null is 0: the model has no weight
    of this size."""
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


def shared_expert() -> tuple[Weight, ...]:
    """Returns the weights of the expert that computes every token, and of its gate.

    The sigmoid of the gate, one number for each token, is multiplied with the expert's output.
    """
    width = "shared_expert_intermediate_size"
    gate_up = tuple(f"mlp.shared_expert.{part}.weight" for part in ("gate_proj", "up_proj"))
    return (
        replace(GATE_UP, parameter="mlp.shared_experts.linear_fc1.weight", tensors=gate_up, rows=(width, width)),
        replace(
            DOWN,
            parameter="mlp.shared_experts.linear_fc2.weight",
            tensors=("mlp.shared_expert.down_proj.weight",),
            columns=width,
        ),
        Weight("mlp.shared_experts.gate_weight", ("mlp.shared_expert_gate.weight",), (1,), "hidden_size"),
    )


_KNOWN = (
    # Llama 1 to 3 (arXiv 2302.13971, 2407.21783).
    Family("llama", layer=(*ATTENTION, *OPTIONAL_BIASES, *DENSE_MLP, *NORMS), flags={"attention_bias": False}),
    # Mistral (arXiv 2310.06825); Megatron computes only the models without a sliding window.
    Family("mistral", layer=(*ATTENTION, *DENSE_MLP, *NORMS)),
    # DeepSeek-V3 and R1 (arXiv 2412.19437), Kimi K2 (arXiv 2507.20534).
    Family(
        "deepseek_v3",
        layer=(*LATENT_ATTENTION, *DENSE_MLP, *NORMS),
        keys={**DENSE_KEYS, **LATENT_KEYS},
        nullable=("q_lora_rank",),
        required={**REQUIRED, "rope_interleave": True},
    ),
    # Mixtral (arXiv 2401.04088).
    Family(
        "mixtral",
        layer=(*ATTENTION, *experts("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2")), *NORMS),
        keys={**EXPERT_KEYS, "moe_intermediate_size": ("intermediate_size",)},
    ),
    # Phi-3 (arXiv 2404.14219) and Phi-4 (arXiv 2412.08905); Megatron computes only the models without a sliding window
    # and without LongRoPE, such as the 14B Phi-4.
    Family(
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
    ),
    # Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115).
    Family("qwen2", layer=(*ATTENTION, QKV_BIAS, *DENSE_MLP, *NORMS)),
    # Qwen1.5-MoE and Qwen2-MoE (arXiv 2407.10671): beside its experts every layer has one that computes every token.
    Family(
        "qwen2_moe",
        layer=(*ATTENTION, replace(QKV_BIAS, if_true="qkv_bias"), *experts(), *shared_expert(), *NORMS),
        keys={**EXPERT_KEYS, "shared_expert_intermediate_size": ("shared_expert_intermediate_size",)},
        flags={"qkv_bias": True},
    ),
    # The dense Qwen3 models (arXiv 2505.09388).
    Family(
        "qwen3", layer=(*ATTENTION, *OPTIONAL_BIASES, *QK_NORMS, *DENSE_MLP, *NORMS), flags={"attention_bias": False}
    ),
    # The Qwen3 models with experts in every layer (arXiv 2505.09388).
    Family(
        "qwen3_moe",
        layer=(*ATTENTION, *OPTIONAL_BIASES, *QK_NORMS, *experts(), *NORMS),
        keys=EXPERT_KEYS,
        flags={"attention_bias": False},
    ),
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _KNOWN}


FUSED = {
    "linear_qkv": ("linear_q", "linear_k", "linear_v"),
    "linear_proj": ("linear_proj",),
    "linear_fc1": ("linear_fc1_gate", "linear_fc1_up"),
    "linear_fc2": ("linear_fc2",),
    "linear_q_proj": ("linear_q_proj",),
    "linear_q_down_proj": ("linear_q_down_proj",),
    "linear_q_up_proj": ("linear_q_up_proj",),
    "linear_kv_down_proj": ("linear_kv_down_proj",),
    "linear_kv_up_proj": ("linear_kv_up_proj",),
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


# Model type -> why vLLM's log-probabilities are known to differ from those of transformers, seen with vLLM 0.32.
ENGINE_DIFFERENCES: Mapping[str, str] = {
    "apertus": "vLLM computes the activation xIELU in another way, for about 0.01 nats",
    "cohere2": "vLLM's sliding window has one token more; samples within the window are not affected",
    "deepseek_v32": "transformers' norms of latent queries and keys use eps 1e-6, vLLM's that of config.json",
    "ernie4_5_moe": "vLLM on CPU leaves the correction bias of the router out",
    "glm4_moe_lite": "transformers' norms of latent queries and keys use eps 1e-6, vLLM's that of config.json",
    "glm_moe_dsa": "transformers' norms of latent queries and keys use eps 1e-6, vLLM's that of config.json",
    "gpt_oss": "vLLM copies unquantized experts past its own reload of published weights (vLLM 0.26 on a GPU, 1 nat; "
    "not proven to be the cause)",
    "ministral3": "vLLM does not scale queries by llama_4_scaling_beta, which acts beyond "
    "original_max_position_embeddings tokens",
}
