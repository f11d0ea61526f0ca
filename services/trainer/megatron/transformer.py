"""Converts a transformers config to Megatron's, using the record of the model's family."""

from typing import Any

from torch.nn import functional as F
from transformers import PretrainedConfig

from services.common.families.architecture import Architecture, make_architecture, require_supported
from services.common.families.registry import FAMILIES
from services.trainer.checkpoint.model_files import load_config


def read_config(model_path: str) -> PretrainedConfig:
    """Reads the config of a model directory.

    Raises:
        InvalidInput: The config cannot be read, or Megatron would not compute the same as the model.
    """
    hf = load_config(model_path)
    require_supported(hf.to_dict(), "megatron", f"{model_path}/config.json")
    return hf


def model_architecture(hf: PretrainedConfig) -> Architecture:
    """Returns the model's shape, with transformers' defaults for what its config.json leaves out.

    Raises:
        InvalidInput: A size is missing, or dense layers and experts are mixed.
    """
    return make_architecture(hf.to_dict(), f"{hf.name_or_path}/config.json")


def transformer_settings(hf: PretrainedConfig) -> dict[str, Any]:
    """Returns the fields of megatron.core.transformer.TransformerConfig that the model determines."""
    model = model_architecture(hf)
    settings = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": hf.intermediate_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_key_value_heads,
        "kv_channels": model.head_dim,
        "layernorm_epsilon": hf.rms_norm_eps,
        "attention_dropout": 0.0,  # as with strategy fsdp: the policy that is trained is the one that sampled
        "add_qkv_bias": model.has("self_attention.linear_qkv.bias"),
        "qk_layernorm": model.has("self_attention.q_layernorm.weight"),
        **(_expert_settings(hf, model) if model.num_experts else {}),
        **model.family.settings,
    }
    return settings | {"activation_func": getattr(F, settings["activation_func"])}


def model_settings(hf: PretrainedConfig) -> dict[str, Any]:
    """Returns the arguments of megatron.core.models.gpt.GPTModel that the model determines."""
    rope = dict(hf.rope_parameters)
    is_partial = FAMILIES[hf.model_type].has_partial_rotary
    settings = {
        "vocab_size": hf.vocab_size,
        "max_sequence_length": hf.max_position_embeddings,
        "share_embeddings_and_output_weights": hf.tie_word_embeddings,
        "position_embedding_type": "rope",
        "rotary_base": rope["rope_theta"],
        "rotary_percent": rope.get("partial_rotary_factor", 1.0) if is_partial else 1.0,
    }
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        settings["seq_len_interpolation_factor"] = rope["factor"]
    elif kind == "llama3":
        settings |= {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
    return settings


def _expert_settings(hf: PretrainedConfig, model: Architecture) -> dict[str, Any]:
    return {
        "num_moe_experts": model.num_experts,
        "moe_ffn_hidden_size": model.moe_intermediate_size,
        "moe_router_topk": model.num_experts_per_tok,
        "moe_router_score_function": "softmax",
        # Softmax over only the chosen experts equals softmax over all experts, renormalized.
        "moe_router_pre_softmax": not getattr(hf, "norm_topk_prob", True),
        "moe_shared_expert_intermediate_size": model.shared_expert_intermediate_size or None,
        "moe_shared_expert_gate": model.has("mlp.shared_experts.gate_weight"),
    }
