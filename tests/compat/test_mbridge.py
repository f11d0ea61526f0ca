"""Tests the internals of mbridge that the trainer uses, and that each correction is still needed."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

import services.trainer.compat.megatron  # noqa: F401  before megatron, which mbridge imports

# isort: split
from mbridge.core.bridge import _MODEL_REGISTRY
from mbridge.core.parallel_states import ParallelStates
from megatron.core.transformer import TransformerConfig
from transformers import AutoConfig, PretrainedConfig

from services.trainer.compat.megatron import mbridge as bridging
from services.trainer.compat.megatron.mbridge import ModelBridge, make_bridge

SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "moe_intermediate_size": 48}
SCALED = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}
LAYER = "decoder.layers.1."


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParallelStates, "get_parallel_state", lambda: ParallelStates(vpp_size=None))


def config(model_type: str, **changes: Any) -> PretrainedConfig:
    return AutoConfig.for_model(model_type, **SHAPE | {"tie_word_embeddings": False} | changes)


def uncorrected(hf: PretrainedConfig) -> Any:
    """Returns mbridge's own bridge for a config that has the attributes of transformers 4."""
    return _MODEL_REGISTRY[hf.model_type](bridging._as_in_transformers_4(hf), dtype=torch.float32)


def corrected(hf: PretrainedConfig, rope: Mapping[str, object] = {}) -> ModelBridge:
    def make_config(**settings: Any) -> TransformerConfig:
        return TransformerConfig(**settings | {"masked_softmax_fusion": False, "moe_grouped_gemm": False})

    return make_bridge(hf, make_config, rope, torch.float32)


def test_it_reads_an_attribute_that_transformers_5_does_not_have() -> None:
    bare = _MODEL_REGISTRY["qwen3"](config("qwen3"), dtype=torch.float32)
    with pytest.raises(AttributeError, match="rope_theta"):
        bare._get_gptmodel_args()
    assert (
        corrected(config("qwen3"))._get_gptmodel_args()["rotary_base"] == config("qwen3").rope_parameters["rope_theta"]
    )


def test_it_computes_no_head_size_if_the_config_has_none() -> None:
    hf = config("mixtral")
    assert hf.head_dim is None
    assert corrected(hf).hf_config.head_dim == 16
    assert hf.head_dim is None  # the caller's is not changed


def test_scaled_rotary_frequencies_are_ignored() -> None:
    hf = config("llama", **SCALED)
    assert uncorrected(hf)._get_gptmodel_args().keys() & {"seq_len_interpolation_factor", "rope_scaling"} == set()
    rope = {"seq_len_interpolation_factor": 2.0}
    assert corrected(hf, rope)._get_gptmodel_args()["seq_len_interpolation_factor"] == 2.0


@pytest.mark.parametrize(
    ("hf", "field", "theirs", "ours"),
    [
        (config("mixtral"), "moe_router_pre_softmax", True, False),
        (config("qwen3_moe", **EXPERTS, norm_topk_prob=False), "moe_router_pre_softmax", False, True),
        (config("qwen2_moe", **EXPERTS, norm_topk_prob=True), "moe_router_pre_softmax", True, False),
        (config("qwen2_moe", **EXPERTS, qkv_bias=False), "add_qkv_bias", True, False),
        (config("qwen2_moe", **EXPERTS), "moe_shared_expert_gate", False, True),
        (config("glm4_moe", **GROUPS), "moe_router_num_groups", None, 4),
        (config("glm4_moe", **GROUPS), "moe_shared_expert_intermediate_size", 48, 96),
        (config("glm4_moe", **GROUPS, attention_bias=False), "add_qkv_bias", True, False),
        (config("qwen2", attention_dropout=0.1), "attention_dropout", 0.1, 0.0),
    ],
    ids=lambda value: value.model_type if isinstance(value, PretrainedConfig) else str(value),
)
def test_it_has_other_settings_than_the_config(hf: PretrainedConfig, field: str, theirs: object, ours: object) -> None:
    assert getattr(uncorrected(hf).config, field) == theirs
    assert getattr(corrected(hf).config, field) == ours


def test_a_tied_model_changes_the_models_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    output, kind = "output_layer.weight", _MODEL_REGISTRY["qwen2"]
    monkeypatch.setattr(kind, "_DIRECT_MAPPING", dict(kind._DIRECT_MAPPING))
    tied = corrected(config("qwen2", tie_word_embeddings=True))
    assert tied.tensor_names(output) == ("model.embed_tokens.weight",)
    assert corrected(config("qwen2")).tensor_names(output) == ("lm_head.weight",)
    uncorrected(config("qwen2", tie_word_embeddings=True))
    assert uncorrected(config("qwen2"))._weight_name_mapping_mcore_to_hf(output) == ["model.embed_tokens.weight"]


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "qwen2_moe"])
def test_not_every_type_ties_the_output_layer(model_type: str) -> None:
    hf = config(model_type, tie_word_embeddings=True)
    assert uncorrected(hf)._weight_name_mapping_mcore_to_hf("output_layer.weight") == ["lm_head.weight"]
    assert corrected(hf).tensor_names("output_layer.weight") == ("model.embed_tokens.weight",)


def test_experts_that_only_etp_cuts_are_not_joined() -> None:
    hf, name = config("mixtral"), f"{LAYER}mlp.experts.linear_fc2.weight3"
    shards = list(torch.randn(64, 96).chunk(2, 1))
    with pytest.raises(AssertionError):
        uncorrected(hf)._weight_merge_across_tp(name, shards, shards[0])
    (whole,) = corrected(hf).join(name, shards)
    assert torch.equal(whole, torch.cat(shards, 1))


@pytest.mark.parametrize(
    ("model_type", "local", "fused"),
    [
        ("llama", "input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ("llama", "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        ("mixtral", "pre_mlp_layernorm.weight", "pre_mlp_layernorm.weight"),
        ("glm4_moe", "pre_mlp_layernorm.weight", "pre_mlp_layernorm.weight"),
        ("mixtral", "mlp.experts.local_experts.3.linear_fc1.weight", "mlp.experts.linear_fc1.weight3"),
    ],
)
def test_it_knows_the_names_of_transformer_engine(model_type: str, local: str, fused: str) -> None:
    bridge = corrected(config(model_type))
    assert bridge.tensor_names(LAYER + local) == bridge.tensor_names(LAYER + fused)
    assert list(bridge.tensor_names(LAYER + local)) == uncorrected(config(model_type))._weight_name_mapping_mcore_to_hf(
        LAYER + fused
    )
