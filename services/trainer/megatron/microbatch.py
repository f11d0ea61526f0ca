"""Pads micro-batches and cuts them into shards for the context-parallel ranks, and joins the outputs of all ranks
again.

With context parallelism each sequence is cut into 2 * CP chunks; rank r holds chunks r and 2 * CP - 1 - r, so that
causal attention is the same work on every rank (arXiv 2407.21783, section 3.3.2). The loss always gets whole sequences.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch.distributed import ProcessGroup

from services.trainer.compat.megatron.attention import zigzag
from services.trainer.router_replay import NO_EXPERT
from services.trainer.updates.logprobs import Targets
from services.trainer.updates.packing import Microbatch


@dataclass(frozen=True)
class Cut:
    """How sequences are padded and cut. Every padded length is a multiple of `align`; further padding of a micro-batch
    makes sequences of its own."""

    cp_size: int
    cp_rank: int
    align: int
    is_packed: bool
    multiple: int = 1
    """Every micro-batch's number of tokens is a multiple of this, and of `align`."""

    def padded(self, length: int) -> int:
        return -(-length // self.align) * self.align

    def num_tokens(self, microbatch: Microbatch) -> int:
        """Returns the padded tokens of the micro-batch, or of each sequence if sequences are not packed."""
        least = sum(map(self.padded, microbatch.lengths)) if self.is_packed else self.padded(microbatch.max_seqlen)
        multiple = math.lcm(self.align, self.multiple)
        return -(-least // multiple) * multiple


@dataclass(frozen=True)
class MicrobatchShard:
    """This CP rank's tokens, [1, T] packed end to end or [B, S] padded, with M of the micro-batch's N predictions."""

    microbatch: Microbatch
    tokens: torch.Tensor
    packed: PackedSeqParams | None
    rows_M: torch.Tensor
    targets: Targets
    where_M: torch.Tensor
    routed_experts: torch.Tensor | None = None
    """Experts of each token in each layer of the whole model, int32 [B, S, L, K] or [1, T, L, K], NO_EXPERT where there
    is only padding; None if the micro-batch has none."""

    def whole(self, values_KM: torch.Tensor, cp_group: ProcessGroup) -> torch.Tensor:
        """Returns the values [K, N] of all predictions, gathered from all CP ranks; only its own M get gradients."""
        whole_KN = values_KM.new_zeros(values_KM.size(0), self.microbatch.targets_N.numel())
        whole_KN = whole_KN.index_copy(1, self.where_M, values_KM)
        # Named for tensor parallelism, but right for any group: a sum in forward, and the gradient as it is in
        # backward.
        return reduce_from_tensor_model_parallel_region(whole_KN, group=cp_group)

    @property
    def num_rows(self) -> int:
        """The rows that the model computes on this CP rank, including padding."""
        return self.tokens.numel()


def least_sizes(microbatches: Sequence[Microbatch], cut: Cut) -> np.ndarray:
    """Returns the smallest `sizes` for `cut_microbatches`."""
    return np.array([(cut.num_tokens(microbatch), len(microbatch.lengths)) for microbatch in microbatches], np.int64)


def cut_microbatches(microbatches: Sequence[Microbatch], cut: Cut, sizes: np.ndarray) -> list[MicrobatchShard]:
    """Returns micro-batches that are padded to `sizes` [micro-batches, 2].

    A size is the number of tokens and any number if sequences are packed, and otherwise the number of tokens of each
    sequence and the number of sequences.
    """
    return [
        _cut_microbatch(microbatch, cut, num_tokens=num_tokens, num_sequences=num_sequences)
        for microbatch, (num_tokens, num_sequences) in zip(microbatches, sizes.tolist(), strict=True)
    ]


def _cut_microbatch(microbatch: Microbatch, cut: Cut, *, num_tokens: int, num_sequences: int) -> MicrobatchShard:
    """Pads to `num_tokens` per micro-batch if sequences are packed, per sequence if not, and cuts this rank's part."""
    padded = _padded_lengths(microbatch, cut, num_tokens, num_sequences)
    lengths = np.array([*microbatch.lengths, *[0] * (len(padded) - len(microbatch.lengths))])
    starts = np.cumsum(lengths) - lengths
    parts = []
    for start, length, full in zip(starts, lengths, padded, strict=True):
        source = np.full(full, -1)  # index into the micro-batch, -1 where there is only padding
        source[:length] = start + np.arange(length)
        parts.append(source[zigzag(full, cut.cp_size, cut.cp_rank).numpy()])
    source = np.concatenate(parts)[None] if cut.is_packed else np.stack(parts)
    rows_M, where_M = _own_predictions(microbatch, source)
    device = microbatch.tokens_T.device
    index = torch.from_numpy(source).to(device)
    where = torch.from_numpy(where_M).to(device)
    routed_experts = None
    if microbatch.experts_TLK is not None:
        own = microbatch.experts_TLK.to(torch.int32)[index.clamp(min=0)]
        routed_experts = torch.where(index[..., None, None] >= 0, own, NO_EXPERT)
    return MicrobatchShard(
        microbatch=microbatch,
        tokens=torch.where(index >= 0, microbatch.tokens_T[index.clamp(min=0)], 0),
        packed=_packed_params(padded, device) if cut.is_packed else None,
        rows_M=torch.from_numpy(rows_M).to(device),
        targets=microbatch.targets.at(where),
        where_M=where,
        routed_experts=routed_experts,
    )


def _padded_lengths(microbatch: Microbatch, cut: Cut, num_tokens: int, num_sequences: int) -> list[int]:
    if not cut.is_packed:
        return [num_tokens] * num_sequences
    padded = [cut.padded(length) for length in microbatch.lengths]
    longest, missing = max(padded), num_tokens - sum(padded)
    filler = [longest] * (missing // longest)
    return [*padded, *filler, *([missing % longest] if missing % longest else [])]


def _own_predictions(microbatch: Microbatch, source: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns which rows of the model's output, flattened from [S, B], predict, and which of the N predictions."""
    order = source.T.reshape(-1)
    row_of = np.full(sum(microbatch.lengths), -1)
    row_of[order[order >= 0]] = np.flatnonzero(order >= 0)
    ends = np.cumsum(microbatch.lengths)
    # The last c tokens of a sequence predict its completion of c tokens.
    predict = [np.arange(end - count, end) for end, count in zip(ends, microbatch.completion_lengths, strict=True)]
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
