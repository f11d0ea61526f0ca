"""Stands in for the package flash-attn, for benchmarks.peers_verl: the same kernels, as torch has them.

flash-attn 2.8 has no wheel for torch 2.11, and compiling it takes longer than the benchmark. transformers asks for the
functions below and passes no more than these arguments to a causal model without windows.
"""

from collections.abc import Mapping
from typing import Any

import torch

__version__ = "2.8.3"


def flash_attn_varlen_func(  # noqa: PLR0913 -- the signature of flash-attn
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **others: Any,
) -> torch.Tensor:
    """Returns the attention of packed sequences; `q`, `k` and `v` are [tokens, heads, head_dim]."""
    _require_unset(others)
    return torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        int(max_seqlen_q),
        int(max_seqlen_k),
        dropout_p,
        causal,
        False,
        scale=softmax_scale,
    )[0]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **others: Any,
) -> torch.Tensor:
    """Returns the attention of sequences of one length; `q`, `k` and `v` are [B, T, heads, head_dim]."""
    _require_unset(others)
    return torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, causal, False, scale=softmax_scale
    )[0]


def _require_unset(others: Mapping[str, Any]) -> None:
    if any(value not in (None, False, 0.0, (-1, -1)) for value in others.values()):
        raise NotImplementedError(f"torch's kernel is called without {others}")


def flash_attn_with_kvcache(*_: Any, **__: Any) -> torch.Tensor:
    """Is imported by transformers and called by no training."""
    raise NotImplementedError("nothing is generated with these kernels")
