"""Computes attention of packed sequences, for both strategies.

In half precision on GPU it uses torch's variable-length kernel, and flash-attn's, if that is installed, for caps of the
scores. Otherwise it pads the sequences on the right: causal attention never looks at later positions, so the padding
needs no mask.

Suffixes: T tokens of all sequences, B sequences, L tokens of the longest, H query heads, K key heads, D numbers of a
head.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from services.common.families.supported import Kernel, choose
from services.trainer.compat.torch import GROUPED, AttentionWithSinks


@dataclass(frozen=True)
class Attention:
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


def token_mask(cu_seqlens_B1: torch.Tensor, longest: int) -> torch.Tensor:
    """Returns where rows of B sequences, padded on the right to L tokens, have tokens: bool [B, L]."""
    return torch.arange(longest, device=cu_seqlens_B1.device)[None, :] < cu_seqlens_B1.diff()[:, None]


def to_rows(packed_TX: torch.Tensor, is_token_BL: torch.Tensor) -> torch.Tensor:
    """Returns rows [B, L, ...] of packed values [T, ...], zero where a row has no token."""
    rows = packed_TX.new_zeros(*is_token_BL.shape, *packed_TX.shape[1:])
    rows[is_token_BL] = packed_TX
    return rows


def attend(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    lengths: tuple[torch.Tensor, int],
    attention: Attention,
) -> torch.Tensor:
    """Attends causally within each sequence; returns [T, H, D]. `lengths` are the bounds of the B sequences, int32
    [B + 1], and the tokens of the longest."""
    has_cap = attention.softcap is not None
    kernel = choose(query_THD.device.type, str(query_THD.dtype), query_THD.size(-1), has_cap=has_cap)
    is_both = has_cap and attention.sinks_H is not None  # which no kernel computes
    compute = _padded if kernel is Kernel.PADDED or is_both else _unpadded
    return compute(query_THD, key_TKD, value_TKD, lengths, attention)


def _unpadded(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    lengths: tuple[torch.Tensor, int],
    attention: Attention,
) -> torch.Tensor:
    (cu_seqlens, longest), width = lengths, value_TKD.size(-1)
    # FlashAttention counts the keys before the query; -1 is all of them.
    window = (-1 if attention.window is None else attention.window - 1, 0)
    if width < query_THD.size(-1):  # multi-head latent attention; the kernel has one size for all
        value_TKD = F.pad(value_TKD, (0, query_THD.size(-1) - width))
    qkv, several = (query_THD, key_TKD, value_TKD), (cu_seqlens, cu_seqlens, longest, longest)
    if attention.softcap is not None:  # for the arguments of 2.8; no host that has it has run this (docs/models.md)
        from flash_attn import flash_attn_varlen_func  # late: it is an extra

        settings = {"softmax_scale": attention.scale, "window_size": window, "softcap": attention.softcap}
        out_THD = flash_attn_varlen_func(*qkv, *several, causal=True, **settings)
    elif attention.sinks_H is not None:
        settings = cu_seqlens, longest, window, attention.scale
        out_THD = AttentionWithSinks.apply(*qkv, attention.sinks_H, settings)
    else:
        out_THD = varlen_attn(*qkv, *several, window_size=window, scale=attention.scale, **GROUPED)
        assert isinstance(out_THD, torch.Tensor)  # return_aux is not set
    return out_THD[..., :width]


def _padded(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    lengths: tuple[torch.Tensor, int],
    attention: Attention,
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
    attention: Attention,
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
