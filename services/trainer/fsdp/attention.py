"""Computes attention over packed sequences, for any transformers model that uses the common attention interface.

In half precision on GPU it uses torch's variable-length kernel. Otherwise it pads the sequences on the right: causal
attention never looks at later positions, so the padding needs no mask.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from services.common.errors import InvalidInput

NAME = "lockstep_packed"
PROBE = "lockstep_probe"
"""An attention that computes nothing and raises ProbeReached."""
_CAUSAL = (-1, 0)
# Grouped-query attention: torch before 2.12 has no argument for it and always allows it.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attends causally within each sequence. query [1, H, T, D]; key, value [1, K, T, D]; result [1, T, H, D]."""
    if problem := _problem(attention_mask, kwargs):
        raise InvalidInput(f"model: {problem} is not supported with strategy fsdp", field="model")
    cu_seqlens, max_seqlen, scale = kwargs["cu_seqlens"], kwargs["max_seqlen"], kwargs.get("scaling")
    qkv_TXD = [x.squeeze(0).transpose(0, 1) for x in (query, key, value)]  # X is H or K
    attend = _unpadded if query.is_cuda and query.dtype is not torch.float32 else _padded
    return attend(qkv_TXD, cu_seqlens, max_seqlen, scale).unsqueeze(0), None


class ProbeReached(Exception):
    """Ends a forward at its first attention layer. `problem` says what `packed_attention` would lack there, if any."""

    def __init__(self, problem: str):
        super().__init__(problem)
        self.problem = problem


def _probe(
    module: torch.nn.Module, query: object, key: object, value: object, attention_mask: object, **kwargs: object
) -> None:
    raise ProbeReached(_problem(attention_mask, kwargs))


def _problem(attention_mask: object, kwargs: Mapping[str, object]) -> str:
    if attention_mask is not None or kwargs.get("sliding_window") is not None:
        return "a mask or a sliding window of attention"
    return "" if "cu_seqlens" in kwargs else "attention that is not told the lengths of packed sequences"


def _unpadded(
    qkv_TXD: Sequence[torch.Tensor], cu_seqlens: torch.Tensor, max_seqlen: int, scale: float | None
) -> torch.Tensor:
    query_THD, key_TKD, value_TKD = qkv_TXD
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    out_THD = varlen_attn(query_THD, key_TKD, value_TKD, *lengths, window_size=_CAUSAL, scale=scale, **_GROUPED)
    assert isinstance(out_THD, torch.Tensor)  # return_aux is not set
    return out_THD


def _padded(
    qkv_TXD: Sequence[torch.Tensor], cu_seqlens: torch.Tensor, max_seqlen: int, scale: float | None
) -> torch.Tensor:
    lengths_B = cu_seqlens.diff()
    inside_BL = torch.arange(max_seqlen, device=cu_seqlens.device)[None, :] < lengths_B[:, None]

    def pad(x: torch.Tensor) -> torch.Tensor:
        padded = x.new_zeros(*inside_BL.shape, *x.shape[1:])
        padded[inside_BL] = x
        return padded.transpose(1, 2)

    query, key, value = map(pad, qkv_TXD)
    out_BHLD = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    return out_BHLD.transpose(1, 2)[inside_BL]


AttentionInterface.register(NAME, packed_attention)
AttentionInterface.register(PROBE, _probe)
