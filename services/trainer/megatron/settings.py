"""Makes Megatron's config of a model from its config.json, the record of its family, and the user's settings."""

import contextlib
import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from torch.nn import functional as F
from transformers import PretrainedConfig

from services.common.config.megatron import MegatronConfig
from services.common.config.trainer import TrainerConfig
from services.common.errors import InvalidInput, PreconditionFailed, Reason
from services.common.families.architecture import Architecture, make_architecture
from services.common.families.layers import SINKS
from services.common.families.registry import FAMILIES
from services.common.families.supported import require_supported
from services.common.json_values import JsonObject
from services.trainer.checkpoint.model_files import load_config

Settings = TypeVar("Settings")

# Settings whose kernels exist only on GPU.
_FUSIONS = (
    "persist_layer_norm",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "apply_rope_fusion",
    "moe_permute_fusion",
)
# Starts of the names of settings that Megatron's config does not take.
_LATE = ("yarn_", "window_rotary_base", "add_bias_linear")
# Scales of current values only: those of delayed scaling would follow from earlier batches, and start anew on resume.
_FLOAT8: Mapping[str, Mapping[str, object]] = {
    "none": {},
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param": False},
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": False},
}
# Compute capability of the oldest GPU that has each.
_CAPABILITIES = {"tensorwise": (8, 9), "blockwise": (9, 0)}
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.uint8}


def read_config(model_path: str) -> PretrainedConfig:
    """Reads the config of a model directory; refuses a model that Megatron would not compute the same."""
    hf = load_config(model_path)
    require_supported(hf.to_dict(), "megatron", f"{model_path}/config.json")
    return hf


def model_architecture(hf: PretrainedConfig) -> Architecture:
    """Returns the model's shape, with transformers' defaults for what its config.json leaves out."""
    return make_architecture(hf.to_dict(), f"{hf.name_or_path}/config.json")


def transformer_config(
    of_model: Mapping[str, object], trainer: TrainerConfig, dtype: torch.dtype, *, is_gpu: bool
) -> TransformerConfig:
    """Makes Megatron's config for one role from the fields that the model determines (`layer_settings`).

    With `is_gpu` it is for TransformerEngine's layers.
    """
    megatron = trainer.megatron
    vpp = megatron.virtual_pipeline_model_parallel_size
    settings: dict[str, object] = {
        **of_model,
        "tensor_model_parallel_size": megatron.tensor_model_parallel_size,
        "sequence_parallel": megatron.has_sequence_parallel,
        "pipeline_model_parallel_size": megatron.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": vpp,
        "context_parallel_size": megatron.context_parallel_size,
        "expert_model_parallel_size": megatron.expert_model_parallel_size,
        "expert_tensor_parallel_size": megatron.etp,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        # The interleaved schedule mixes up variable shapes or deadlocks, so its micro-batches are padded to one size.
        "variable_seq_lengths": vpp is None,
        "batch_p2p_comm": False,
        "overlap_p2p_comm": vpp is not None and is_gpu,
        # Otherwise Megatron would divide each micro-batch's loss by the number of micro-batches and average over ranks.
        "calculate_per_token_loss": True,
        "finalize_model_grads_func": finalize_model_grads,
        # The cache is for float8; with it the first micro-batch would overwrite gradients, see add_gradients_in_place.
        "disable_parameter_transpose_cache": True,
        **_FLOAT8[megatron.fp8],
        **_moe_settings(megatron),
        **_recompute_settings(trainer, megatron),
        **dict.fromkeys(_FUSIONS, is_gpu),
        # Megatron's fused kernel of latent attention has no plain rotation and is experimental, and the other one does
        # not scale cosine and sine, as YaRN does.
        **({"apply_rope_fusion": False} if {"kv_lora_rank", "yarn_beta_fast"} & of_model.keys() else {}),
        # On a GPU it is Megatron's default.
        **({} if is_gpu else {"masked_softmax_fusion": False, "moe_grouped_gemm": False}),
    }
    overrides = megatron.transformer_config_kwargs
    # Layers read constants of rotary embeddings from their config, which has no fields for them, and it refuses biases
    # of experts that ETP cuts, because Megatron's own experts would add them on each rank.
    late = {key: value for key, value in settings.items() if key.startswith(_LATE)}
    settings = {key: value for key, value in settings.items() if key not in late} | {"add_bias_linear": False}
    cls = MLATransformerConfig if "kv_lora_rank" in settings else TransformerConfig
    config = make(cls, settings, overrides, "megatron.transformer_config_kwargs")
    vars(config).update(late)
    if config.moe_z_loss_coeff is not None:
        # Megatron divides the loss by these ranks and then weighs each rank's part by only that rank's tokens
        # (moe/router.py, apply_z_loss, with calculate_per_token_loss).
        config.moe_z_loss_coeff *= megatron.tensor_model_parallel_size * megatron.context_parallel_size
    return config


def require_float8(megatron: MegatronConfig, device: torch.device, key: str) -> None:
    """Raises PreconditionFailed (UNSUPPORTED_VERSION) if this rank cannot compute in the float8 of `megatron`."""
    if megatron.fp8 == "none":
        return
    least = _CAPABILITIES[megatron.fp8]
    needs = f"a GPU of compute capability {least[0]}.{least[1]} or above, and TransformerEngine"
    if device.type != "cuda":
        problem = f"this rank computes on {device.type}"
    elif (capability := torch.cuda.get_device_capability(device)) < least:
        problem = f"this rank's GPU has {capability[0]}.{capability[1]}"
    elif find_spec("transformer_engine") is None:
        problem = "TransformerEngine is not installed here"
    else:
        return
    raise PreconditionFailed(
        f"{key}.fp8 {megatron.fp8} needs {needs}, and {problem}; set {key}.fp8 to none",
        reason=Reason.UNSUPPORTED_VERSION,
        field=f"{key}.fp8",
    )


def layer_settings(hf: PretrainedConfig) -> dict[str, object]:
    """Returns the fields of megatron.core.transformer.TransformerConfig that the model determines."""
    model = model_architecture(hf)
    settings: dict[str, object] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": hf.intermediate_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_key_value_heads,
        "kv_channels": model.head_dim,
        "layernorm_epsilon": hf.rms_norm_eps,
        "attention_dropout": 0.0,  # as with strategy fsdp: the policy that is trained is the one that sampled
        "add_qkv_bias": model.has("self_attention.linear_qkv.bias"),
        # Megatron would sum the gradients of norms over all heads, which TP cuts.
        "qk_layernorm": model.has("self_attention.q_layernorm.weight") and not model.norms_all_heads,
        **(_expert_settings(hf, model) if model.num_experts else {}),
        **_latent_settings(hf, model),
        **model.family.settings,
        **_window_settings(hf, model),
        **_sink_settings(hf, model),
    }
    return settings | {"activation_func": getattr(F, str(settings["activation_func"]))}


def _latent_settings(hf: PretrainedConfig, model: Architecture) -> dict[str, object]:
    """Returns the fields of MLATransformerConfig for a model with latent attention, or none for others."""
    if not model.kv_lora_rank:
        return {}
    settings = {
        "q_lora_rank": model.q_lora_rank or None,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_head_dim": model.head_dim - model.qk_rope_head_dim,
        "qk_pos_emb_head_dim": model.qk_rope_head_dim,
        "v_head_dim": model.v_head_dim,
        "qk_layernorm": True,  # the norms of the latents
    }
    return settings | latent_rope_settings(hf)


def latent_rope_settings(hf: PretrainedConfig) -> dict[str, object]:
    """Returns those of MLATransformerConfig's fields that rotate queries and keys."""
    rope = dict(hf.rope_parameters)
    settings: dict[str, object] = {
        "rope_type": "rope",
        "rotary_base": rope["rope_theta"],
        "rotary_scaling_factor": 1.0,
        "mscale_all_dim": 0.0,
    }
    if rope.get("rope_type") == "yarn":
        has_both = rope.get("mscale") and rope.get("mscale_all_dim")
        settings |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": rope["factor"],
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
            "beta_fast": rope.get("beta_fast") or 32,
            "beta_slow": rope.get("beta_slow") or 1,
            # Without both, cosine and sine are scaled by `factor` alone.
            "mscale": rope["mscale"] if has_both else None,
            "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
        }
    return settings


def _window_settings(hf: PretrainedConfig, model: Architecture) -> dict[str, object]:
    """Returns the fields for the windows and for YaRN of a family that has them here (gpt-oss, OLMo 3)."""
    if not model.family.has_windows:
        return {}
    settings: dict[str, object] = {}
    if hf.sliding_window:  # which counts the query's own key
        settings["window_size"] = (hf.sliding_window - 1, 0)
        settings["window_attn_skip_freq"] = [int(kind == "sliding_attention") for kind in hf.layer_types]
    rope = scaled_rope(hf)
    if rope is not hf.rope_parameters:
        settings["window_rotary_base"] = hf.rope_parameters["sliding_attention"]["rope_theta"]
    if rope.get("rope_type") == "yarn":
        has_both = rope.get("mscale") and rope.get("mscale_all_dim")
        original = rope.get("original_max_position_embeddings") or hf.max_position_embeddings
        settings |= {
            "yarn_rotary_scaling_factor": rope["factor"],
            "yarn_original_max_position_embeddings": original,
            "yarn_beta_fast": rope.get("beta_fast") or 32,
            "yarn_beta_slow": rope.get("beta_slow") or 1,
            "yarn_mscale": rope["mscale"] if has_both else None,
            "yarn_mscale_all_dim": rope["mscale_all_dim"] if has_both else None,
            "yarn_correction_range_round_to_int": rope.get("truncate", True),
        }
    return settings


def _sink_settings(hf: PretrainedConfig, model: Architecture) -> dict[str, object]:
    """Returns the fields for a model with sinks (gpt-oss), or none for others."""
    if not model.has(SINKS.parameter):
        return {}
    clamp = getattr(hf, "swiglu_limit", 7.0)  # transformers 5.17 has no key for it
    return {"add_bias_linear": True, "softmax_type": "learnable", "activation_func_clamp_value": clamp}


def scaled_rope(hf: PretrainedConfig) -> JsonObject:
    """Returns the rotary embedding of the model, or of its layers without a window if those with one have another."""
    return hf.rope_parameters.get("full_attention", hf.rope_parameters)


def model_settings(hf: PretrainedConfig) -> dict[str, Any]:
    """Returns the arguments of megatron.core.models.gpt.GPTModel that the model determines."""
    rope = scaled_rope(hf)
    family = FAMILIES[hf.model_type]
    is_partial, is_yarn = family.has_partial_rotary, family.has_yarn and rope.get("rope_type") == "yarn"
    return {
        "vocab_size": hf.vocab_size,
        "max_sequence_length": hf.max_position_embeddings,
        "share_embeddings_and_output_weights": hf.tie_word_embeddings,
        "position_embedding_type": "yarn" if is_yarn else "rope",
        "rotary_base": rope["rope_theta"],
        "rotary_percent": rope.get("partial_rotary_factor", 1.0) if is_partial else 1.0,
        **rope_settings(hf),
    }


def rope_settings(hf: PretrainedConfig) -> dict[str, object]:
    """Returns those of GPTModel's arguments that scale the rotary frequencies."""
    rope = scaled_rope(hf)
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        return {"seq_len_interpolation_factor": rope["factor"]}
    if kind == "llama3":
        return {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
    return {}


def _expert_settings(hf: PretrainedConfig, model: Architecture) -> dict[str, object]:
    return {
        "num_moe_experts": model.num_experts,
        "moe_ffn_hidden_size": model.moe_intermediate_size,
        "moe_layer_freq": [int(kind == "experts") for kind in model.kinds],
        "moe_router_topk": model.num_experts_per_tok,
        "moe_router_score_function": model.family.router,
        # Softmax over only the chosen experts equals softmax over all experts, renormalized.
        "moe_router_pre_softmax": not getattr(hf, "norm_topk_prob", True),
        "moe_shared_expert_intermediate_size": model.shared_expert_intermediate_size or None,
        "moe_shared_expert_gate": model.has("mlp.shared_experts.gate_weight"),
        **(_sigmoid_settings(hf) if model.family.router == "sigmoid" else {}),
    }


def _sigmoid_settings(hf: PretrainedConfig) -> dict[str, object]:
    has_groups = getattr(hf, "n_group", 1) > 1
    return {
        "moe_router_pre_softmax": False,
        "moe_router_topk_scaling_factor": getattr(hf, "routed_scaling_factor", None),
        "moe_router_num_groups": hf.n_group if has_groups else None,
        "moe_router_group_topk": hf.topk_group if has_groups else None,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,  # it stays as published
    }


def _moe_settings(megatron: MegatronConfig) -> dict[str, object]:
    moe = megatron.moe
    settings = {
        "moe_grouped_gemm": moe.grouped_gemm,
        # Megatron's own all-gather refuses sequences of variable length, so another takes the place of this one.
        "moe_token_dispatcher_type": "flex" if moe.token_dispatcher_type == "flex" else "alltoall",
        "moe_router_load_balancing_type": moe.load_balancing_type,
        "moe_aux_loss_coeff": moe.aux_loss_coeff * _router_ranks(megatron),
        "moe_router_dtype": moe.router_dtype,
        "moe_router_score_function": moe.router_score_function,
        "moe_router_enable_expert_bias": moe.router_enable_expert_bias,
    }
    return {name: value for name, value in settings.items() if value is not None}


def _router_ranks(megatron: MegatronConfig) -> int:
    """Returns the number of ranks over which an auxiliary loss is summed.

    Megatron 0.16 weighs each rank's part by only that rank's tokens (moe/router.py, attach_and_log_load_balancing_loss,
    with calculate_per_token_loss), so the coefficient is multiplied by this number.
    """
    if megatron.moe.load_balancing_type == "global_aux_loss":
        return dist.get_world_size() // megatron.pipeline_model_parallel_size
    return megatron.tensor_model_parallel_size * megatron.context_parallel_size


def _recompute_settings(trainer: TrainerConfig, megatron: MegatronConfig) -> dict[str, object]:
    if not trainer.gradient_checkpointing:
        return {}
    if megatron.recompute_granularity == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(megatron.recompute_modules)}
    return {
        "recompute_granularity": "full",
        "recompute_method": megatron.recompute_method,
        "recompute_num_layers": megatron.recompute_num_layers,
    }


def make(cls: type[Settings], settings: Mapping[str, object], overrides: Mapping[str, object], field: str) -> Settings:
    """Returns `cls(**settings)`, with the user's `overrides`, of the config's `field`, in place of `settings`."""
    known = [f.name for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]
    for key in overrides:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise _refusal(f"{field}.{key}", f"not a field of {cls.__module__}.{cls.__qualname__}{hint}")
    with refusals(field):
        return cls(**{**settings, **{key: _typed(key, value, field) for key, value in overrides.items()}})


@contextlib.contextmanager
def refusals(field: str) -> Iterator[None]:
    """Converts the errors of Megatron's own checks to InvalidInput for the config `field`."""
    try:
        yield
    except (AssertionError, ValueError, TypeError) as error:
        raise _refusal(field, f"Megatron refuses the settings: {error}") from error


def _typed(key: str, value: object, field: str) -> object:
    names: Mapping[str, object] = {}
    if key.endswith("_dtype") and key != "moe_router_dtype":
        names = _DTYPES
    elif key == "attention_backend":
        names = AttnBackend.__members__
    if not names or not isinstance(value, str):
        return value
    if value.lower() not in names:
        raise _refusal(f"{field}.{key}", f"{value!r} is not one of {', '.join(names)}")
    return names[value.lower()]


def _refusal(field: str, problem: str) -> InvalidInput:
    return InvalidInput(f"{field}: {problem}", reason=Reason.INVALID_CONFIG, field=field)
