"""Refuses models that this backend would not compute as transformers does, when a run is opened."""

from typing import NoReturn

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from services.common.errors import InvalidInput
from services.trainer.compat.torch import GROUPED_ALIGN_BYTES
from services.trainer.fsdp import attention


def require_supported(hf_config: PretrainedConfig, causal_lm: PreTrainedModel, compute_dtype: torch.dtype) -> None:
    """Checks the model, whose weights are on the meta device and whose config is supported.

    Raises:
        InvalidInput: The logits depend on more than the output layer's weight, a layer would mix the sequences of a
            pack, or the experts have a width that torch cannot compute.
    """
    output_layer = getattr(causal_lm, "lm_head", None)
    if output_layer is None:
        _refuse("an output layer that is not lm_head")
    if output_layer.bias is not None:
        _refuse("lm_head.bias")
    modules = (hf_config, *causal_lm.modules())
    if any(getattr(module, "sliding_window", None) for module in modules):  # 0 means none, as in Qwen2-MoE
        raise InvalidInput("model: sliding_window in its config.json is not supported by any strategy", field="model")
    if any(isinstance(module, nn.Conv1d) for module in modules):
        _refuse("convolutions over tokens")
    if not isinstance(getattr(getattr(causal_lm, "model", None), "layers", None), nn.ModuleList):
        _refuse(f"model_type {hf_config.model_type}, whose layers are not model.layers,")
    _require_aligned_experts(causal_lm, compute_dtype)
    _require_packed_attention(causal_lm, hf_config.model_type)


def _require_aligned_experts(causal_lm: PreTrainedModel, dtype: torch.dtype) -> None:
    for name, parameter in causal_lm.named_parameters():
        if parameter.ndim == 3 and parameter.shape[-1] * dtype.itemsize % GROUPED_ALIGN_BYTES:
            multiple = GROUPED_ALIGN_BYTES // dtype.itemsize
            _refuse(
                f"{name} of shape {list(parameter.shape)} (moe_intermediate_size, hidden_size): the last size must be "
                f"a multiple of {multiple} in {dtype}; it"
            )


def _require_packed_attention(causal_lm: PreTrainedModel, model_type: str) -> None:
    """Runs the model on the meta device up to its first attention layer."""
    causal_lm.set_attn_implementation(attention.PROBE)
    tokens = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    lengths = torch.zeros(2, dtype=torch.int32, device="meta")
    packed = {"position_ids": tokens, "use_cache": False, "cu_seqlens": lengths, "max_seqlen": 2}
    try:
        causal_lm.get_submodule("model")(input_ids=tokens, **packed)
    except attention.ProbeReached as reached:
        if reached.problem:
            _refuse(f"model_type {model_type}, with {reached.problem},")
    except NotImplementedError:
        pass  # a layer before the attention needs values, which meta tensors do not have; packed_attention checks again
    except Exception as error:  # nothing is computed, and sizes that do not fit may raise anything
        raise _refusal(f"model_type {model_type} ({error!r})") from error
    else:
        _refuse(f"model_type {model_type}, which does not use transformers' attention interface,")
    finally:
        causal_lm.set_attn_implementation(attention.NAME)


def _refuse(what: str) -> NoReturn:
    raise _refusal(what)


def _refusal(what: str) -> InvalidInput:
    return InvalidInput(f"model: {what} is not supported with strategy fsdp", field="model")
