"""Computes the attention of any transformers model that uses the common attention interface, over packed sequences.

Suffixes: T tokens of all sequences, H query heads, K key heads, D numbers of a head.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AttentionInterface

from services.common.errors import InvalidInput
from services.common.families.kernels import choose
from services.trainer.attention import Attention, attend

NAME = "lockstep_packed"
# What models hand to every attention, and what changes nothing here: there is no cache, no dropout in evaluation, and
# the sequences are known by their lengths.
_WITHOUT_EFFECT = frozenset(
    ("dropout", "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions", "past_key_values")
)
_KNOWN = frozenset(("cu_seqlens", "max_seqlen", "scaling", "sliding_window", "s_aux", "softcap"))


def chosen(decoder: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> str:
    """Names the kernels that a model's layers will use."""
    names = dict[str, None]()
    for module in decoder.modules():
        head_size = getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None)
        if isinstance(head_size, int) and hasattr(module, "o_proj"):
            has_cap = getattr(module, "attn_logit_softcapping", None) is not None
            names[choose(device.type, str(dtype), head_size, has_cap=has_cap)] = None
    return ", ".join(names)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attends causally within each sequence. query [1, H, T, D]; key, value [1, K, T, D]; result [1, T, H, D].

    Raises:
        InvalidInput: The model asks for something that is not known here.
    """
    _require_known(attention_mask, kwargs)
    scale, lengths = kwargs.get("scaling"), (kwargs["cu_seqlens"], kwargs["max_seqlen"])
    attention = Attention(
        query.size(-1) ** -0.5 if scale is None else scale,
        kwargs.get("sliding_window"),
        kwargs.get("s_aux"),
        kwargs.get("softcap"),
    )
    query_THD, key_TKD, value_TKD = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    return attend(query_THD, key_TKD, value_TKD, lengths, attention).unsqueeze(0), None


def _require_known(attention_mask: object, kwargs: Mapping[str, object]) -> None:
    unknown = {name for name, value in kwargs.items() if value is not None} - _KNOWN - _WITHOUT_EFFECT
    if attention_mask is not None:
        problem = "an attention mask"
    elif "cu_seqlens" not in kwargs:
        problem = "attention that is not told the lengths of packed sequences"
    elif unknown:
        problem = f"attention with {', '.join(sorted(unknown))}"
    else:
        return
    raise InvalidInput(f"model: {problem} is not supported with strategy fsdp", field="model")


AttentionInterface.register(NAME, packed_attention)
