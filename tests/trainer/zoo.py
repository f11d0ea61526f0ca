"""Describes a tiny model of every type that people train, with every kind of layer that its family has.

Heads have the size 32, the smallest that vLLM serves on CPU; windows are shorter than the samples of the tests.
"""

from typing import Any

from tests.support import VOCAB

WINDOW = 8
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_MOSTLY_LINEAR = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
_DENSE_FIRST = ["dense", "sparse", "sparse", "sparse"]
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def _sizes(*without: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in _COMMON.items() if key not in without} | changes


_DELTA = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": _MOSTLY_LINEAR,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED_EXPERT = {"shared_expert_intermediate_size": 32}
_LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_DEEPSEEK = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
}
_GLM = _DEEPSEEK | {"n_group": 1}
_SPARSE = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 16}
_GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0625}
_HYBRID = {
    **_MAMBA,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 64,
    "intermediate_size": 32,
    "layer_types": _MOSTLY_LINEAR,
}
_GEMMA = {"sliding_window": WINDOW, "layer_types": _ALTERNATING}
_SQUARED = _GEMMA | {"query_pre_attn_scalar": 32}
_GEMMA_4 = _GEMMA | {"vocab_size_per_layer_input": VOCAB, "final_logit_softcapping": 30.0}
_YARN = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}
_LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "rope_theta": 5e5,
    "original_max_position_embeddings": 8192,
}
_GPT_OSS_ROPE = _YARN | {
    "factor": 4.0,
    "truncate": False,
    "original_max_position_embeddings": 128,
    "rope_theta": 150000.0,
}
_DEEPSEEK_ROPE = _YARN | {
    "rope_theta": 1e4,
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_MINISTRAL_ROPE = _YARN | {
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "max_position_embeddings": 256,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "out_hidden_size": 128,
    "num_heads": 2,
    "intermediate_size": 64,
    "patch_size": 4,
}
_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_MROPE = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e6}
_QWEN_3_VL = _sizes(rope_parameters=_MROPE | {"mrope_interleaved": True})

# Name -> model type of transformers and its settings. Composite models have their text part in `text_config`.
ZOO: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("apertus", _sizes("head_dim")),
    "arcee": ("arcee", _sizes(hidden_act="relu2")),
    "bamba": ("bamba", _sizes("head_dim", **_MAMBA, attn_layer_indices=[1])),
    "cohere2": ("cohere2", _sizes(sliding_window=WINDOW, layer_types=_ALTERNATING, logit_scale=0.25)),
    "cohere2_noscale": ("cohere2", _sizes(sliding_window=WINDOW, layer_types=_ALTERNATING, logit_scale=1.0)),
    "deepseek_v2": (
        "deepseek_v2",
        _sizes(
            "head_dim",
            **_LATENT,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
        ),
    ),
    "deepseek_v3": ("deepseek_v3", _sizes("head_dim", **_LATENT, **_DEEPSEEK, first_k_dense_replace=1)),
    "deepseek_v3_yarn": (
        "deepseek_v3",
        _sizes("head_dim", **_LATENT, **_DEEPSEEK, first_k_dense_replace=1, rope_parameters=_DEEPSEEK_ROPE),
    ),
    "deepseek_v32": (
        "deepseek_v32",
        _sizes("head_dim", **_LATENT, **_DEEPSEEK, **_SPARSE, mlp_layer_types=_DENSE_FIRST),
    ),
    "ernie4_5": ("ernie4_5", _sizes()),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        _sizes("head_dim", moe_num_experts=8, moe_k=2, moe_intermediate_size=32, moe_layer_end_index=3),
    ),
    "exaone4": ("exaone4", _sizes("head_dim", **_GEMMA, sliding_window_pattern=2)),
    "exaone4_full": ("exaone4", _sizes("head_dim", sliding_window=None, layer_types=["full_attention"] * 4)),
    "falcon_h1": (
        "falcon_h1",
        _sizes(
            **_MAMBA | {"mamba_n_heads": 4},
            mamba_d_ssm=128,
            lm_head_multiplier=0.04,
            embedding_multiplier=5.6,
            key_multiplier=0.4,
        ),
    ),
    "falcon_h1_noscale": ("falcon_h1", _sizes(**_MAMBA | {"mamba_n_heads": 4}, mamba_d_ssm=128)),
    "gemma2": ("gemma2", _sizes(**_SQUARED)),
    "gemma3": ("gemma3", {"text_config": _sizes(**_SQUARED), "vision_config": _SIGLIP, "mm_tokens_per_image": 4}),
    "gemma3_text": ("gemma3_text", _sizes(**_SQUARED)),
    "gemma4": (
        "gemma4",
        {
            "text_config": _sizes(**_GEMMA_4, hidden_size_per_layer_input=16),
            "vision_config": _SIGLIP | {"num_key_value_heads": 2, "head_dim": 16, "patch_size": 4},
            "audio_config": None,
        },
    ),
    "gemma4_text": ("gemma4_text", _sizes(**_GEMMA_4, hidden_size_per_layer_input=16, num_kv_shared_layers=0)),
    "gemma4_text_shared": ("gemma4_text", _sizes(**_GEMMA_4, hidden_size_per_layer_input=16, num_kv_shared_layers=2)),
    "gemma4_text_moe": (
        "gemma4_text",
        _sizes(
            **_GEMMA_4,
            hidden_size_per_layer_input=0,
            enable_moe_block=True,
            num_experts=8,
            top_k_experts=2,
            moe_intermediate_size=32,
            attention_k_eq_v=True,
        ),
    ),
    "gemma4_text_nocap": (
        "gemma4_text",
        _sizes(
            sliding_window=WINDOW,
            layer_types=["full_attention"] * 4,
            hidden_size_per_layer_input=16,
            vocab_size_per_layer_input=VOCAB,
        ),
    ),
    "glm4": ("glm4", _sizes()),
    "glm4_moe": ("glm4_moe", _sizes(**_GLM, first_k_dense_replace=1, use_qk_norm=True)),
    "glm4_moe_lite": ("glm4_moe_lite", _sizes("head_dim", **_LATENT, **_GLM, mlp_layer_types=_DENSE_FIRST)),
    "glm_moe_dsa": (
        "glm_moe_dsa",
        _sizes("head_dim", **_LATENT, **_GLM, **_SPARSE, mlp_layer_types=_DENSE_FIRST, indexer_types=["full"] * 4),
    ),
    "gpt_oss": ("gpt_oss", _sizes(**_GEMMA, num_local_experts=8, num_experts_per_tok=2, rope_parameters=_GPT_OSS_ROPE)),
    "granite": ("granite", _sizes("head_dim", **_GRANITE, logits_scaling=8.0)),
    "granite_noscale": ("granite", _sizes("head_dim", **_GRANITE, logits_scaling=1.0)),
    "granitemoehybrid": ("granitemoehybrid", _sizes("head_dim", **_GRANITE | _HYBRID, logits_scaling=8.0)),
    "granitemoehybrid_noscale": ("granitemoehybrid", _sizes("head_dim", **_GRANITE | _HYBRID, logits_scaling=1.0)),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", _sizes()),
    "kimi_linear": (
        "kimi_linear",
        _sizes(
            "head_dim",
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=16,
            v_head_dim=16,
            num_key_value_heads=4,
            num_experts=8,
            num_experts_per_token=2,
            moe_intermediate_size=32,
            linear_head_dim=16,
            linear_num_heads=4,
            layer_types=_MOSTLY_LINEAR,
            mlp_layer_types=_DENSE_FIRST,
        ),
    ),
    "lfm2": (
        "lfm2",
        _sizes(
            "head_dim",
            layer_types=["conv", "conv", "full_attention", "conv"],
            block_auto_adjust_ff_dim=False,
            full_attn_idxs=None,
        ),
    ),
    "lfm2_moe": (
        "lfm2_moe",
        _sizes("head_dim", **_EXPERTS, layer_types=["conv", "conv", "full_attention", "conv"], num_dense_layers=1),
    ),
    "llama": ("llama", _sizes(rope_parameters=_LLAMA_3)),
    "llama4_text": (
        "llama4_text",
        _sizes(
            intermediate_size_mlp=128,
            num_local_experts=4,
            num_experts_per_tok=1,
            attention_chunk_size=WINDOW,
            interleave_moe_layer_step=2,
            attn_temperature_tuning=True,
            floor_scale=8,
            no_rope_layers=[1, 0, 1, 0],
            layer_types=["chunked_attention", "full_attention"] * 2,
        ),
    ),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        _sizes(
            **_GEMMA,
            v_head_dim=32,
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            mlp_layer_types=_DENSE_FIRST,
        ),
    ),
    "minicpm3": ("minicpm3", _sizes("head_dim", **_LATENT, dim_model_base=32, scale_emb=12, scale_depth=1.4)),
    "minimax_m2": ("minimax_m2", _sizes(num_local_experts=8, num_experts_per_tok=2, intermediate_size=32)),
    "ministral": ("ministral", _sizes(**_GEMMA)),
    "ministral3": ("ministral3", _sizes(rope_parameters=_MINISTRAL_ROPE)),
    "mistral": ("mistral", _sizes(sliding_window=None)),
    "mistral3": (
        "mistral3",
        {
            "text_config": _sizes(sliding_window=None, model_type="mistral"),
            "vision_config": _SIGLIP | {"model_type": "pixtral", "head_dim": 16},
        },
    ),
    "mistral_window": ("mistral", _sizes(sliding_window=WINDOW)),
    "mixtral": ("mixtral", _sizes(num_local_experts=8, num_experts_per_tok=2, sliding_window=None)),
    "nemotron_h": (
        "nemotron_h",
        _sizes(
            "num_hidden_layers",
            layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
            ssm_state_size=16,
            mamba_num_heads=8,
            mamba_head_dim=32,
            n_groups=2,
            chunk_size=16,
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            moe_shared_expert_intermediate_size=32,
        ),
    ),
    "olmo2": ("olmo2", _sizes("head_dim")),
    "olmo3": ("olmo3", _sizes("head_dim", **_GEMMA)),
    "olmo_hybrid": ("olmo_hybrid", _sizes("head_dim", **_DELTA | {"linear_num_key_heads": 4}, num_key_value_heads=4)),
    "phi3": ("phi3", _sizes("head_dim", sliding_window=None)),
    "phi3_window": ("phi3", _sizes("head_dim", sliding_window=WINDOW)),
    "qwen2": ("qwen2", _sizes("head_dim", tie_word_embeddings=True)),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        {
            "text_config": _sizes("head_dim", rope_parameters=_MROPE),
            "vision_config": _QWEN_VISION | {"fullatt_block_indexes": [0], "window_size": 16},
        },
    ),
    "qwen2_window": ("qwen2", _sizes("head_dim", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2)),
    "qwen3": ("qwen3", _sizes(tie_word_embeddings=True)),
    "qwen3_5": ("qwen3_5", {"text_config": _sizes(**_DELTA), "vision_config": _QWEN_VISION}),
    "qwen3_5_moe": (
        "qwen3_5_moe",
        {
            "text_config": _sizes("intermediate_size", **_EXPERTS, **_DELTA, **_SHARED_EXPERT),
            "vision_config": _QWEN_VISION,
        },
    ),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", _sizes("intermediate_size", **_EXPERTS, **_DELTA, **_SHARED_EXPERT)),
    "qwen3_5_text": ("qwen3_5_text", _sizes(**_DELTA)),
    "qwen3_moe": ("qwen3_moe", _sizes(**_EXPERTS, norm_topk_prob=True)),
    "qwen3_moe_mixed": ("qwen3_moe", _sizes(**_EXPERTS, norm_topk_prob=True, mlp_only_layers=[0])),
    "qwen3_next": ("qwen3_next", _sizes(**_EXPERTS, **_DELTA, **_SHARED_EXPERT)),
    "qwen3_vl": (
        "qwen3_vl",
        {"text_config": _QWEN_3_VL, "vision_config": _QWEN_VISION | {"deepstack_visual_indexes": [0]}},
    ),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        {"text_config": _QWEN_3_VL | _EXPERTS, "vision_config": _QWEN_VISION | {"deepstack_visual_indexes": [0]}},
    ),
    "seed_oss": ("seed_oss", _sizes()),
    "smollm3": ("smollm3", _sizes("head_dim", no_rope_layers=[1, 1, 1, 0], tie_word_embeddings=True)),
    "zamba2": (
        "zamba2",
        _sizes(
            "head_dim",
            num_key_value_heads=4,
            layers_block_type=["linear_attention", "linear_attention", "hybrid", "linear_attention"],
            n_mamba_heads=8,
            mamba_d_state=16,
            mamba_headdim=32,
            chunk_size=16,
        ),
    ),
}

_ROUTER = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "first_k_dense_replace": 1, "moe_layer_freq": 1}
_CONV = {"conv_dim": 128, "conv_dim_out": 128, "block_dim": 128}
# Keys of published models, by type, that vLLM reads and transformers does not write.
PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"topk_method": "greedy", "scoring_func": "softmax", "n_group": 1, "topk_group": 1},
    "deepseek_v3": _ROUTER,
    "glm4_moe_lite": _ROUTER,
    "lfm2": _CONV,
    "lfm2_moe": _CONV,
    "minimax_m2": {"scoring_func": "sigmoid", "rotary_dim": 32, "use_routing_bias": True},
}
