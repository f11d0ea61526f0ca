"""Tests which models each strategy refuses from config.json, and that omitted keys mean transformers' defaults."""

from math import inf, log, nan
from typing import Any

import pytest

from services.common.errors import InvalidInput
from services.common.families.registry import FAMILIES
from services.common.families.supported import ACTIVATIONS, ASK_FSDP, require_bounds, require_supported

BOTH, MEGATRON = ("fsdp", "megatron"), ("megatron",)
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 32.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

ALPHA = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}  # as in Hunyuan-7B-Instruct


@pytest.mark.parametrize(
    ("content", "refused_by", "named"),
    [
        ({"model_type": "qwen3"}, (), ""),
        ({"model_type": "mistral"}, MEGATRON, "sliding_window 4096"),  # transformers' default
        ({"model_type": "mistral", "sliding_window": None}, (), ""),
        ({"model_type": "qwen2", "sliding_window": 4096}, (), ""),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, (), ""),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True}, MEGATRON, "sliding_window 4096"),
        (
            {"model_type": "mistral", "sliding_window": 4096, "use_sliding_window": False},
            MEGATRON,
            "sliding_window 4096",
        ),
        ({"model_type": "phi3", "sliding_window": 2047}, MEGATRON, "sliding_window 2047"),
        ({"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}}, BOTH, "'dynamic'"),
        ({"model_type": "llama", "rope_scaling": ALPHA}, BOTH, "'dynamic'"),  # transformers ignores the alpha
        ({"model_type": "hunyuan_v1_dense", "rope_scaling": ALPHA | {"alpha": 0}}, BOTH, "'dynamic'"),
        ({"model_type": "hunyuan_v1_dense", "rope_scaling": ALPHA}, MEGATRON, "not hunyuan_v1_dense"),
        ({"model_type": "phi3", "rope_parameters": {"rope_type": "longrope"}}, BOTH, "'longrope'"),
        ({"model_type": "phi3", "rope_scaling": {"type": "su"}}, BOTH, "'su'"),
        ({"model_type": "gemma9", "rope_parameters": {"full": {"rope_type": "dynamic"}}}, BOTH, "'dynamic'"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, (), ""),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, MEGATRON, "'yarn'"),
        ({"model_type": "llama", "rope_scaling": LLAMA3, "max_position_embeddings": 8192}, (), ""),
        ({"model_type": "llama", "rope_scaling": LLAMA3 | {"low_freq_factor": 2.0}}, MEGATRON, "'llama3'"),
        ({"model_type": "llama", "partial_rotary_factor": 0.5}, BOTH, "partial_rotary_factor 0.5"),
        ({"model_type": "llama", "partial_rotary_factor": 1.0}, (), ""),
        ({"model_type": "phi3", "partial_rotary_factor": 0.5}, (), ""),
        ({"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}}, BOTH, "quantization_config"),
        ({"model_type": "qwen3", "transformers_weights": "other.safetensors"}, BOTH, "transformers_weights"),
        (
            {"model_type": "qwen3_moe", "num_experts": 10**9},
            BOTH,
            "num_experts 1000000000 is not a number from 0 to 16384",
        ),
        ({"model_type": "bloom", "n_layer": 10**7}, BOTH, "n_layer 10000000 is not a number from 0 to 4096"),
        ({"model_type": "qwen3", "num_labels": 10**9}, BOTH, "num_labels 1000000000 is not a number from 0 to 100000"),
        ({"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**8}}, BOTH, "layers 100000000 is not"),
        (
            {"model_type": "gemma3", "vision_config": {"depth": float("inf")}},
            BOTH,
            "depth inf is not a number from 0 to 4096",
        ),
        ({"model_type": "qwen2", "rope_theta": 0}, BOTH, "rope_theta 0 is not a number from 1e-30"),
        ({"model_type": "qwen2", "rope_theta": float("nan")}, BOTH, "rope_theta nan is not"),
        ({"model_type": "qwen2", "rope_theta": 1e-9}, (), ""),
        ({"model_type": "gemma9", "head_dim": 0, "rms_norm_eps": None}, MEGATRON, "strategy megatron knows"),
        *(({"model_type": "gemma9", key: -1}, BOTH, f"{key} -1 is not") for key in ("head_dim", "vocab_size")),
        *(
            ({"model_type": "qwen3", "rms_norm_eps": eps}, BOTH, f"rms_norm_eps {eps!r} is")
            for eps in (-1, 0, nan, inf)
        ),
        ({"model_type": "gemma9", "text_config": {"layer_norm_eps": "1e-6"}}, BOTH, "layer_norm_eps '1e-6' is not"),
        (
            {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": nan}},
            BOTH,
            "factor nan is not a number",
        ),
        ({"model_type": "qwen3", "max_position_embeddings": 10**8}, BOTH, "max_position_embeddings 100000000 is not"),
        ({"model_type": "qwen3", "dtype": "int8"}, BOTH, "dtype 'int8' is not one of float16"),
        ({"model_type": "gemma9", "torch_dtype": 3}, BOTH, "torch_dtype 3 is not one of"),
        ({"model_type": "qwen3", "torch_dtype": None, "dtype": "bfloat16"}, (), ""),
        ({"model_type": "qwen3", "hidden_act": ["silu"]}, BOTH, "hidden_act ['silu'] is not a function that"),
        ({"model_type": "qwen3", "hidden_act": "silly"}, BOTH, "hidden_act 'silly' is not a function that"),
        ({"model_type": "gemma9", "rope_theta": [1e4, 5_000_000]}, MEGATRON, "strategy megatron knows"),
        ({"model_type": "gemma9", "rope_theta": [1e4, -1]}, BOTH, "rope_theta -1 is not a number from 1e-30"),
        ({"model_type": "gemma9", "rope_parameters": {"full": {"rope_theta": 1e999}}}, BOTH, "rope_theta inf is not"),
        ({"model_type": "gemma9", "text_config": {"rope_parameters": {"rope_theta": "x"}}}, BOTH, "rope_theta 'x' is"),
        ({"model_type": "deepseek_v3", "rope_scaling": {"type": "yarn", "factor": 40.0}}, (), ""),
        ({"model_type": "deepseek_v3", "rope_scaling": {"type": "yarn", "truncate": False}}, MEGATRON, "'truncate'"),
        ({"model_type": "deepseek_v3", "rope_scaling": {"type": "yarn", "attention_factor": 1.0}}, MEGATRON, "'yarn'"),
        ({"model_type": "deepseek_v3", "rope_scaling": {"type": "linear", "factor": 2.0}}, MEGATRON, "'linear'"),
        ({"model_type": "deepseek_v3", "rope_interleave": False}, MEGATRON, "rope_interleave False"),
        ({"model_type": "deepseek_v3", "quantization_config": {"quant_method": "fp8"}}, BOTH, "quantization_config"),
        ({"model_type": "llama", "attention_bias": True}, MEGATRON, "attention_bias True"),
        ({"model_type": "llama", "logit_scale": 0.5}, (), ""),
        ({"model_type": "glm4_moe", "attention_bias": True, "partial_rotary_factor": 0.5}, (), ""),
        ({"model_type": "glm4_moe", "norm_topk_prob": False}, MEGATRON, "norm_topk_prob False"),
        ({"model_type": "glm4_moe", "num_experts_per_tok": 1}, MEGATRON, "num_experts_per_tok 1"),
        ({"model_type": "glm4_moe", "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4}, (), ""),
        ({"model_type": "glm4_moe", "num_experts_per_tok": 8, "n_group": 8, "topk_group": 2}, MEGATRON, "n_group 8"),
        ({"model_type": "gpt_oss", "sliding_window": 128, "rope_scaling": YARN | {"truncate": False}}, (), ""),
        ({"model_type": "gpt_oss", "rope_scaling": YARN | {"attention_factor": 1.0}}, MEGATRON, "'yarn'"),
        ({"model_type": "olmo3", "rope_scaling": YARN | {"attention_factor": 0.1 * log(YARN["factor"]) + 1}}, (), ""),
        ({"model_type": "olmo3", "rope_parameters": {"sliding_attention": YARN}}, MEGATRON, "of sliding_attention"),
        ({"model_type": "gpt_oss", "attention_bias": False}, MEGATRON, "attention_bias False"),
        ({"model_type": "gpt_oss", "swiglu_alpha": 1.0}, MEGATRON, "swiglu_alpha 1.0"),
        ({"model_type": "qwen3", "layer_types": ["linear_attention"]}, (), ""),
        ({"model_type": "gpt2"}, MEGATRON, "knows llama"),
        ({"model_type": "mistral3", "text_config": {"model_type": "mistral"}}, MEGATRON, "not mistral3"),
        ({"model_type": "gemma3", "text_config": {"rope_scaling": {"type": "su"}}}, BOTH, "'su'"),
    ],
)
def test_rules(content: dict[str, Any], refused_by: tuple[str, ...], named: str) -> None:
    for strategy in BOTH:
        if strategy not in refused_by:
            require_supported(content, strategy, "config.json")
            continue
        with pytest.raises(InvalidInput) as caught:
            require_supported(content, strategy, "config.json")
        assert named in caught.value.message and "config.json" in caught.value.message
        # An error names the other strategy only if the config does not show that it refuses the model too.
        assert (ASK_FSDP in caught.value.message) == (refused_by == MEGATRON)


def test_a_scaling_that_is_no_object_is_refused() -> None:
    with pytest.raises(InvalidInput, match="rope_parameters is 3"):
        require_supported({"model_type": "llama", "rope_scaling": 3}, "fsdp", "config.json")


def test_no_config_of_transformers_has_a_number_out_of_bounds() -> None:
    transformers, activations = pytest.importorskip("transformers"), pytest.importorskip("transformers.activations")
    assert set(activations.ACT2FN) == ACTIVATIONS
    every = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    configs = [config for config in every if "musicgen" not in config.model_type]  # which have no defaults
    for config in configs:
        require_bounds(config().to_dict(), config.model_type)
    assert len(configs) > 100


@pytest.mark.parametrize("strategy", BOTH)
def test_a_model_type_that_is_no_name_is_refused(strategy: str) -> None:
    with pytest.raises(InvalidInput, match=r"model_type \['llama'\] is not a name"):
        require_supported({"model_type": ["llama"]}, strategy, "config.json")


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_config_leaves_out_is_as_in_transformers(family: str) -> None:
    """`lockstep plan` reads the file; the trainer reads transformers' config, in which all defaults are filled in."""
    transformers = pytest.importorskip("transformers")
    for strategy in BOTH:
        assert _refusal({"model_type": family}, strategy) == _refusal(
            transformers.AutoConfig.for_model(family).to_dict(), strategy
        )


def _refusal(content: dict[str, Any], strategy: str) -> str:
    try:
        require_supported(content, strategy, "config.json")
    except InvalidInput as error:
        return error.message
    return ""
