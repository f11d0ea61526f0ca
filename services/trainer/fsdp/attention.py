"""Computes attention over packed sequences, for any transformers model that uses the common attention interface.

In half precision on GPU it uses torch's variable-length kernel, and flash-attn's, if that is installed, for caps of the
scores. Otherwise it pads the sequences on the right: causal attention never looks at later positions, so the padding
needs no mask.

Suffixes: T tokens of all sequences, B sequences, L tokens of the longest, H query heads, K key heads, D numbers of a
head.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from services.common.errors import InvalidInput
from services.common.families.kernels import Kernel, choose
from services.trainer.compat.torch import GROUPED, varlen_attn_with_sinks

NAME = "lockstep_packed"
# What models hand to every attention, and what changes nothing here: there is no cache, no dropout in evaluation, and
# the sequences are known by their lengths.
_WITHOUT_EFFECT = frozenset(
    ("dropout", "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions", "past_key_values")
)
_KNOWN = frozenset(("cu_seqlens", "max_seqlen", "scaling", "sliding_window", "s_aux", "softcap"))


@dataclass(frozen=True)
class _Attention:
    """What a layer's attention is, besides causal.

    `window` counts the keys that a query sees, its own included. `sinks_H` are logits of a key without value, one for
    each head. Scores are `softcap` * tanh(scores / softcap).
    """

    scale: float
    window: int | None
    sinks_H: torch.Tensor | None
    softcap: float | None

    @property
    def is_plain(self) -> bool:
        return self.sinks_H is None and self.softcap is None


def chosen(decoder: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> str:
    """Names the kernels that a model's layers will use."""
    names = dict[str, None]()
    for module in decoder.modules():
        head_size = getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None)
        if isinstance(head_size, int) and hasattr(module, "o_proj"):
            has_cap = getattr(module, "attn_logit_softcapping", None) is not None
            names[choose(device.type, str(dtype), head_size, has_cap=has_cap)] = None
    return ", ".join(names)


def token_mask(cu_seqlens_B1: torch.Tensor, longest: int) -> torch.Tensor:
    """Returns where rows of B sequences, padded on the right to L tokens, have tokens: bool [B, L]."""
    return torch.arange(longest, device=cu_seqlens_B1.device)[None, :] < cu_seqlens_B1.diff()[:, None]


def to_rows(packed_TX: torch.Tensor, is_token_BL: torch.Tensor) -> torch.Tensor:
    """Returns rows [B, L, ...] of packed values [T, ...], zero where a row has no token."""
    rows = packed_TX.new_zeros(*is_token_BL.shape, *packed_TX.shape[1:])
    rows[is_token_BL] = packed_TX
    return rows


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
    attention = _Attention(
        query.size(-1) ** -0.5 if scale is None else scale,
        kwargs.get("sliding_window"),
        kwargs.get("s_aux"),
        kwargs.get("softcap"),
    )
    query_THD, key_TKD, value_TKD = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    has_cap = attention.softcap is not None
    kernel = choose(query.device.type, str(query.dtype), query.size(-1), has_cap=has_cap)
    is_both = has_cap and attention.sinks_H is not None  # which no kernel computes
    attend = _padded if kernel is Kernel.PADDED or is_both else _unpadded
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


def _unpadded(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    lengths: tuple[torch.Tensor, int],
    attention: _Attention,
) -> torch.Tensor:
    (cu_seqlens, longest), width = lengths, value_TKD.size(-1)
    # FlashAttention counts the keys before the query; -1 is all of them.
    window = (-1 if attention.window is None else attention.window - 1, 0)
    if width < query_THD.size(-1):  # multi-head latent attention; the kernel has one size for all
        value_TKD = F.pad(value_TKD, (0, query_THD.size(-1) - width))
    qkv = (query_THD, key_TKD, value_TKD)
    if attention.softcap is not None:
        out_THD = _capped(*qkv, lengths, window, attention)
    elif attention.sinks_H is not None:
        out_THD = varlen_attn_with_sinks(*qkv, attention.sinks_H, (cu_seqlens, longest, window, attention.scale))
    else:
        several = (cu_seqlens, cu_seqlens, longest, longest)
        out_THD = varlen_attn(*qkv, *several, window_size=window, scale=attention.scale, **GROUPED)
        assert isinstance(out_THD, torch.Tensor)  # return_aux is not set
    return out_THD[..., :width]


def _capped(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    lengths: tuple[torch.Tensor, int],
    window: tuple[int, int],
    attention: _Attention,
) -> torch.Tensor:
    """Calls flash-attn, for the arguments of 2.8. No host that has it has run this (docs/models.md)."""
    from flash_attn import flash_attn_varlen_func  # late: it is an extra

    bounds, longest = lengths
    settings = {"softmax_scale": attention.scale, "window_size": window, "softcap": attention.softcap or 0.0}
    several = (bounds, bounds, longest, longest)
    return flash_attn_varlen_func(query_THD, key_TKD, value_TKD, *several, causal=True, **settings)


def _padded(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    lengths: tuple[torch.Tensor, int],
    attention: _Attention,
) -> torch.Tensor:
    is_token_BL, longest = token_mask(*lengths), lengths[1]
    query, key, value = (to_rows(x, is_token_BL).transpose(1, 2) for x in (query_THD, key_TKD, value_TKD))
    is_seen_LL = None
    if attention.window is not None or not attention.is_plain:
        positions_L = torch.arange(longest, device=query.device)
        before_LL = positions_L[:, None] - positions_L[None, :]
        is_seen_LL = (before_LL >= 0) & (before_LL < (attention.window or longest))
    if attention.is_plain:
        out_BHLD = F.scaled_dot_product_attention(
            query, key, value, is_seen_LL, is_causal=is_seen_LL is None, scale=attention.scale, enable_gqa=True
        )
    else:
        out_BHLD = _explicit(query, key, value, is_seen_LL, attention)
    return out_BHLD.transpose(1, 2)[is_token_BL]


def _explicit(
    query_BHLD: torch.Tensor,
    key_BKLD: torch.Tensor,
    value_BKLD: torch.Tensor,
    is_seen_LL: torch.Tensor | None,
    attention: _Attention,
) -> torch.Tensor:
    """Computes what no kernel of torch does, with all scores in memory."""
    group = query_BHLD.size(1) // key_BKLD.size(1)
    key_BHLD, value_BHLD = key_BKLD.repeat_interleave(group, 1), value_BKLD.repeat_interleave(group, 1)
    scores = query_BHLD @ key_BHLD.transpose(-1, -2) * attention.scale
    if attention.softcap is not None:
        scores = torch.tanh(scores / attention.softcap) * attention.softcap
    assert is_seen_LL is not None, "only plain attention needs no mask"
    scores = scores.masked_fill(~is_seen_LL, float("-inf")).float()
    if attention.sinks_H is not None:
        sinks = attention.sinks_H.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    shares = scores.softmax(-1)[..., : key_BHLD.size(2)]
    return shares.to(value_BHLD.dtype) @ value_BHLD


AttentionInterface.register(NAME, packed_attention)
