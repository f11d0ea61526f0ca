"""The known model families, by the model_type in a model's config.json, and the matrices that can have adapters."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, cast

from services.common.families.layers import (
    ALL_HEADS_NORMS,
    ATTENTION,
    ATTENTION_OUTPUT,
    ATTENTION_OUTPUT_BIAS,
    CORRECTION_BIAS,
    DENSE_MLP,
    DOWN,
    EMBEDDING,
    FINAL_NORM,
    GATE_UP,
    LATENT_ATTENTION,
    NORMS,
    OPTIONAL_BIASES,
    OUTPUT,
    OUTPUT_NORMS,
    QK_NORMS,
    QKV,
    QKV_BIAS,
    ROUTER_BIAS,
    SHARED_EXPERT_GATE,
    SINKS,
    STACKED_EXPERTS,
    Weight,
    experts,
    shared_expert,
)

# A kind of layer: its feed-forward network is one for all tokens, or a router chooses experts for each.
Kind = Literal["dense", "experts"]

# How a router scores experts:
#   softmax  over the experts; the highest are chosen
#   sigmoid  of each expert, to which a bias is added to choose them (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)
Router = Literal["softmax", "sigmoid"]


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
# A layer has one shared expert, `num_shared_experts` times as wide as one of the others.
SHARED_KEYS: Mapping[str, tuple[str, ...]] = {
    **DENSE_KEYS,
    **EXPERT_KEYS,
    "num_experts": ("n_routed_experts",),
    "num_shared_experts": ("n_shared_experts",),
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
    """The models of one `model_type`: decoders whose layers are of one kind, or of two."""

    model_type: str
    kinds: Mapping[Kind, tuple[Weight, ...]]
    """Weights of a layer of each kind, in the order of the checkpoint."""
    is_dense: Callable[[Mapping[str, object], int], bool] = lambda config, layer: False
    """Takes a config and the number of a layer; returns whether this layer of a model with experts is dense. Raises
    ValueError or TypeError if the config is wrong."""
    router: Router = "softmax"
    """How the router of a layer of experts scores them."""
    num_mtp_layers: int = 0
    """transformers' default of `num_nextn_predict_layers`: checkpoints have so many more layers, which predict further
    tokens. They are not loaded."""
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: DENSE_KEYS)
    """The Architecture's sizes that config.json must have, each with its keys there; that of dense layers only if the
    model has some."""
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
    has_windows: bool = False
    """Whether strategy megatron computes the sliding windows of these models, which are in the layers that
    `layer_types` names."""
    has_yarn: bool = False
    """Whether strategy megatron computes the rotary scaling YaRN of these models (arXiv 2309.00071)."""
    norms_outputs: bool = False
    """Whether the norms of a layer are of the outputs of attention and feed-forward network, not of their inputs."""
    layers: str = "model.layers"
    """Name of the list of layers in the checkpoint."""
    embedding: Weight = EMBEDDING
    final_norm: Weight = FINAL_NORM
    output: Weight = OUTPUT
    """Output layer of a model that does not tie it to the embedding."""


def dense_or_experts(attention: Collection[Weight], feed_forward: Collection[Weight]) -> dict[Kind, tuple[Weight, ...]]:
    """Returns the kinds of layers of a model some of whose layers have a dense network in place of experts."""
    return {"dense": (*attention, *DENSE_MLP, *NORMS), "experts": (*attention, *feed_forward, *NORMS)}


def is_in_front(config: Mapping[str, object], layer: int, *, default: int) -> bool:
    """Returns whether a layer is one of the first `first_k_dense_replace`, which are dense; `default` is
    transformers'."""
    count = config.get("first_k_dense_replace", default)
    if not isinstance(count, int):
        raise ValueError(f"first_k_dense_replace is {count!r}, not a number of layers")
    return layer < count


def is_between_steps(config: Mapping[str, object], layer: int) -> bool:
    """Returns whether a layer is dense by Qwen's keys: one of each `decoder_sparse_step` layers, the last, has experts,
    unless `mlp_only_layers` names it."""
    step, named = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    if not isinstance(step, int) or step < 1 or not isinstance(named, Collection):
        raise ValueError(f"decoder_sparse_step {step!r} and mlp_only_layers {named!r} are not a step and layers")
    return layer in named or (layer + 1) % step > 0


def is_named_dense(config: Mapping[str, object], layer: int) -> bool:
    """Returns whether `mlp_layer_types` says that a layer is dense; without this key the first one is."""
    types = config.get("mlp_layer_types")
    if types is None:
        return layer == 0
    if not isinstance(types, list) or layer >= len(cast("list[object]", types)):
        raise ValueError(f"mlp_layer_types is {types!r}, not a type for each layer")
    return cast("list[object]", types)[layer] == "dense"


# OLMo 2 (arXiv 2501.00656).
OLMO2 = Family("olmo2", kinds={"dense": (*ATTENTION, *ALL_HEADS_NORMS, *DENSE_MLP, *OUTPUT_NORMS)}, norms_outputs=True)
# DeepSeek-V3 and R1 (arXiv 2412.19437), Kimi K2 (arXiv 2507.20534), Moonlight (arXiv 2502.16982).
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    kinds=dense_or_experts(LATENT_ATTENTION, (*experts(), CORRECTION_BIAS, *shared_expert("mlp.shared_experts"))),
    is_dense=partial(is_in_front, default=3),
    router="sigmoid",
    num_mtp_layers=1,
    keys={**SHARED_KEYS, **LATENT_KEYS},
    nullable=("q_lora_rank",),
    required={**REQUIRED, "rope_interleave": True},
)

_KNOWN = (
    # Llama 1 to 3 (arXiv 2302.13971, 2407.21783).
    Family(
        "llama", kinds={"dense": (*ATTENTION, *OPTIONAL_BIASES, *DENSE_MLP, *NORMS)}, flags={"attention_bias": False}
    ),
    # Mistral (arXiv 2310.06825); Megatron computes only the models without a sliding window.
    Family("mistral", kinds={"dense": (*ATTENTION, *DENSE_MLP, *NORMS)}),
    # GLM-4.5 and GLM-4.6 (arXiv 2508.06471).
    Family(
        "glm4_moe",
        kinds=dense_or_experts(
            (
                *ATTENTION,
                replace(QKV_BIAS, if_true="attention_bias"),
                *(replace(norm, if_true="use_qk_norm") for norm in QK_NORMS),
            ),
            (*experts(), CORRECTION_BIAS, *shared_expert("mlp.shared_experts")),
        ),
        is_dense=partial(is_in_front, default=1),
        router="sigmoid",
        num_mtp_layers=1,
        keys=SHARED_KEYS,
        flags={"attention_bias": False, "use_qk_norm": False},
        required={key: value for key, value in REQUIRED.items() if key != "attention_bias"},
        has_partial_rotary=True,
    ),
    DEEPSEEK_V3,
    # GLM-4.7-Flash.
    replace(DEEPSEEK_V3, model_type="glm4_moe_lite", is_dense=is_named_dense),
    # gpt-oss (arXiv 2508.10925).
    Family(
        "gpt_oss",
        kinds={
            "experts": (
                SINKS,
                *ATTENTION,
                QKV_BIAS,
                ATTENTION_OUTPUT_BIAS,
                experts("mlp.router")[0],
                ROUTER_BIAS,
                *STACKED_EXPERTS,
                *NORMS,
            )
        },
        keys={**EXPERT_KEYS, "moe_intermediate_size": ("intermediate_size",)},
        required={"hidden_act": "silu", "attention_bias": True, "swiglu_alpha": 1.702},
        has_windows=True,
        has_yarn=True,
    ),
    # Mixtral (arXiv 2401.04088).
    Family(
        "mixtral",
        kinds={
            "experts": (
                *ATTENTION,
                *experts("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2")),
                *NORMS,
            )
        },
        keys={**EXPERT_KEYS, "moe_intermediate_size": ("intermediate_size",)},
    ),
    # MiniMax-M2.
    Family(
        "minimax_m2",
        kinds={
            "experts": (
                *ATTENTION,
                *ALL_HEADS_NORMS,
                *experts("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2")),
                replace(CORRECTION_BIAS, tensors=("block_sparse_moe.e_score_correction_bias",)),
                *NORMS,
            )
        },
        router="sigmoid",
        keys={**EXPERT_KEYS, "moe_intermediate_size": ("intermediate_size",)},
        has_partial_rotary=True,
    ),
    OLMO2,
    # OLMo 3 (arXiv 2512.13961).
    replace(OLMO2, model_type="olmo3", has_windows=True, has_yarn=True),
    # Phi-3 (arXiv 2404.14219) and Phi-4 (arXiv 2412.08905); Megatron computes only the models without a sliding window
    # and without LongRoPE, such as the 14B Phi-4.
    Family(
        "phi3",
        kinds={
            "dense": (
                ATTENTION_OUTPUT,
                replace(QKV, tensors=("self_attn.qkv_proj.weight",)),
                replace(GATE_UP, tensors=("mlp.gate_up_proj.weight",)),
                DOWN,
                *NORMS,
            )
        },
        has_partial_rotary=True,
        required={**REQUIRED, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    ),
    # Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115).
    Family("qwen2", kinds={"dense": (*ATTENTION, QKV_BIAS, *DENSE_MLP, *NORMS)}),
    # Qwen1.5-MoE and Qwen2-MoE (arXiv 2407.10671): beside its experts a layer has one that computes every token.
    Family(
        "qwen2_moe",
        kinds=dense_or_experts(
            (*ATTENTION, replace(QKV_BIAS, if_true="qkv_bias")),
            (*experts(), *shared_expert("mlp.shared_expert"), SHARED_EXPERT_GATE),
        ),
        is_dense=is_between_steps,
        keys={**DENSE_KEYS, **EXPERT_KEYS, "shared_expert_intermediate_size": ("shared_expert_intermediate_size",)},
        flags={"qkv_bias": True},
    ),
    # The dense Qwen3 models (arXiv 2505.09388).
    Family(
        "qwen3",
        kinds={"dense": (*ATTENTION, *OPTIONAL_BIASES, *QK_NORMS, *DENSE_MLP, *NORMS)},
        flags={"attention_bias": False},
    ),
    # The Qwen3 models with experts (arXiv 2505.09388).
    Family(
        "qwen3_moe",
        kinds=dense_or_experts((*ATTENTION, *OPTIONAL_BIASES, *QK_NORMS), experts()),
        is_dense=is_between_steps,
        keys={**DENSE_KEYS, **EXPERT_KEYS},
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
    "deepseek_v2": "the likely cause on CPU is that of deepseek_v3, with which vLLM computes it",
    "deepseek_v3": "vLLM on CPU rotates queries and keys of latent attention otherwise, unless their scaling is YaRN",
    "deepseek_v32": "transformers' norms of latent queries and keys use eps 1e-6, vLLM's that of config.json",
    "ernie4_5_moe": "vLLM on CPU leaves the correction bias of the router out",
    "glm4_moe_lite": "transformers' norms of latent queries and keys use eps 1e-6, vLLM's that of config.json; on CPU "
    "vLLM also rotates them otherwise",
    "glm_moe_dsa": "transformers' norms of latent queries and keys use eps 1e-6, vLLM's that of config.json",
    "ministral3": "vLLM does not scale queries by llama_4_scaling_beta, which acts beyond "
    "original_max_position_embeddings tokens",
}

# Model types that mbridge 0.15.1 registers, and of which it is known what must be corrected in it.
MBRIDGE_TYPES = ("deepseek_v3", "glm4_moe", "llama", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
