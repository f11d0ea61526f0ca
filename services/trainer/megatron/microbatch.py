"""Pads and cuts packs into micro-batches for one context-parallel rank, and joins the outputs of all ranks again.

With context parallelism each sequence is cut into 2 * CP chunks; rank r holds chunks r and 2 * CP - 1 - r, so that
causal attention is the same work on every rank (arXiv 2407.21783, section 3.3.2). The loss always gets whole sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch.distributed import ProcessGroup

from services.trainer.compat.megatron.attention import zigzag
from services.trainer.routes import NO_ROUTE
from services.trainer.updates.packing import Pack


@dataclass(frozen=True)
class Cut:
    """How sequences are padded and cut. Every padded length is a multiple of `align`."""

    cp_size: int
    cp_rank: int
    align: int
    is_packed: bool

    def padded(self, length: int) -> int:
        return -(-length // self.align) * self.align

    def num_tokens(self, pack: Pack) -> int:
        """Returns the padded tokens of the pack, or of each sequence if sequences are not packed."""
        return sum(map(self.padded, pack.lengths)) if self.is_packed else self.padded(pack.max_seqlen)


@dataclass(frozen=True)
class MicroBatch:
    """This CP rank's tokens, [1, T] packed end to end or [B, S] padded, with M of the pack's N predictions."""

    pack: Pack
    tokens: torch.Tensor
    packed: PackedSeqParams | None
    rows_M: torch.Tensor
    targets_M: torch.Tensor
    where_M: torch.Tensor
    routes: torch.Tensor | None = None
    """Experts of each token in each layer of the whole model, int32 [B, S, L, K] or [1, T, L, K], NO_ROUTE where there
    is only padding; None if the pack has none."""
    kept_MK: torch.Tensor | None = None
    """The kept sets of the M predictions, as in Pack; None if the pack has none."""

    def whole(self, values_KM: torch.Tensor, cp_group: ProcessGroup) -> torch.Tensor:
        """Returns the values [K, N] of all predictions, gathered from all CP ranks; only its own M get gradients."""
        whole_KN = values_KM.new_zeros(values_KM.size(0), self.pack.targets_N.numel())
        whole_KN = whole_KN.index_copy(1, self.where_M, values_KM)
        return reduce_from_tensor_model_parallel_region(whole_KN, group=cp_group)

    @property
    def num_rows(self) -> int:
        """Returns the number of rows that the model computes on this CP rank, including padding."""
        return self.tokens.numel()


def least_sizes(packs: Sequence[Pack], cut: Cut) -> np.ndarray:
    """Returns the smallest `sizes` for `cut_packs`."""
    return np.array([(cut.num_tokens(pack), len(pack.lengths)) for pack in packs], np.int64)


def cut_packs(packs: Sequence[Pack], cut: Cut, sizes: np.ndarray) -> list[MicroBatch]:
    """Returns micro-batches that are padded to `sizes` [packs, 2].

    A size is the number of tokens and any number if sequences are packed, and otherwise the number of tokens of each
    sequence and the number of sequences.
    """
    return [
        _cut_pack(pack, cut, num_tokens=num_tokens, num_sequences=num_sequences)
        for pack, (num_tokens, num_sequences) in zip(packs, sizes.tolist(), strict=True)
    ]


def _cut_pack(pack: Pack, cut: Cut, *, num_tokens: int, num_sequences: int) -> MicroBatch:
    """Pads to `num_tokens` per pack if sequences are packed, per sequence if not, and cuts this rank's part."""
    padded = _padded_lengths(pack, cut, num_tokens, num_sequences)
    lengths = np.array([*pack.lengths, *[0] * (len(padded) - len(pack.lengths))])
    starts = np.cumsum(lengths) - lengths
    parts = []
    for start, length, full in zip(starts, lengths, padded, strict=True):
        source = np.full(full, -1)  # index into the pack, -1 where there is only padding
        source[:length] = start + np.arange(length)
        parts.append(source[zigzag(full, cut.cp_size, cut.cp_rank).numpy()])
    source = np.concatenate(parts)[None] if cut.is_packed else np.stack(parts)
    rows_M, where_M = _own_predictions(pack, source)
    device = pack.tokens_T.device
    index = torch.from_numpy(source).to(device)
    where = torch.from_numpy(where_M).to(device)
    routes = None
    if pack.routes_TLK is not None:
        own = pack.routes_TLK.to(torch.int32)[index.clamp(min=0)]
        routes = torch.where(index[..., None, None] >= 0, own, NO_ROUTE)
    return MicroBatch(
        pack=pack,
        tokens=torch.where(index >= 0, pack.tokens_T[index.clamp(min=0)], 0),
        packed=_packed_params(padded, device) if cut.is_packed else None,
        rows_M=torch.from_numpy(rows_M).to(device),
        targets_M=pack.targets_N[where],
        where_M=where,
        routes=routes,
        kept_MK=None if pack.kept_NK is None else pack.kept_NK[where],
    )


def _padded_lengths(pack: Pack, cut: Cut, num_tokens: int, num_sequences: int) -> list[int]:
    if not cut.is_packed:
        return [num_tokens] * num_sequences
    padded = [cut.padded(length) for length in pack.lengths]
    longest, missing = max(padded), num_tokens - sum(padded)
    filler = [longest] * (missing // longest)
    return [*padded, *filler, *([missing % longest] if missing % longest else [])]


def _own_predictions(pack: Pack, source: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns which rows of the model's output, flattened from [S, B], predict, and which of the N predictions."""
    order = source.T.reshape(-1)
    row_of = np.full(sum(pack.lengths), -1)
    row_of[order[order >= 0]] = np.flatnonzero(order >= 0)
    ends = np.cumsum(pack.lengths)
    # The last c tokens of a sequence predict its completion of c tokens.
    predict = [np.arange(end - count, end) for end, count in zip(ends, pack.completion_lengths, strict=True)]
    rows_N = row_of[np.concatenate(predict)]
    return rows_N[rows_N >= 0], np.flatnonzero(rows_N >= 0)


def _packed_params(padded: Sequence[int], device: torch.device) -> PackedSeqParams:
    cu_seqlens = torch.tensor([0, *np.cumsum(padded)], dtype=torch.int32, device=device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens,
        cu_seqlens_kv_padded=cu_seqlens,
        max_seqlen_q=max(padded),
        max_seqlen_kv=max(padded),
    )
