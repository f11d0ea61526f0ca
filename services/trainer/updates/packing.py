"""Packs samples into micro-batches, equally many per rank and balanced by tokens. Pure functions."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import torch

from services.common.batches import decode_sampling_masks, decode_top_k, encode_top_k
from services.common.errors import InvalidInput
from services.common.routed_experts import RoutedExpertsShape
from services.trainer.updates.logprobs import Targets
from services.trainer.updates.softmax import TopK


@dataclass(frozen=True)
class Microbatch:
    """Holds sequences end to end, as the model reads them: T tokens, B sequences, N predicted completion tokens.

    The last token of a sequence predicts nothing and is left out of T. `columns` holds one value per predicted
    token: behavior_logprobs, loss_mask (1 or 0), completion_length (how many tokens of its sample have mask 1) and,
    if the batch has them, advantages, returns, values, old_logprobs and ref_logprobs.

    Example: prompt [5, 6], completion [7, 8] gives tokens [5, 6, 7], predict [1, 2], targets [7, 8].
    """

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    cu_seqlens_B1: torch.Tensor
    lengths: tuple[int, ...]
    predict_N: torch.Tensor
    targets_N: torch.Tensor
    completion_lengths: tuple[int, ...]
    columns: dict[str, torch.Tensor]
    experts_TLK: torch.Tensor | None = None
    """The K experts that the engine chose for each token in each of L layers, if they are to be replayed."""
    num_expert_layers: int = 0
    """How many of these layers have experts."""
    sampling_mask_NK: torch.Tensor | None = None
    """The tokens that truncated sampling kept for each predicted token, int32, -1 after the last of them; None if the
    batch has no sampling masks."""
    teacher_tokens_NK: torch.Tensor | None = None
    """The tokens that the teacher finds most probable at each prediction, int32, -1 for padding; None if the loss does
    not read them."""
    teacher_logprobs_NK: torch.Tensor | None = None
    """The teacher's log-probabilities of them, and of all others together, float32 [N, K + 1]."""
    top_k: TopK = field(default_factory=TopK)
    """The most probable tokens of each prediction, which the model also returns."""

    @property
    def targets(self) -> Targets:
        """What a language model computes at each prediction."""
        return Targets(self.targets_N, self.sampling_mask_NK, self.teacher_tokens_NK, self.top_k)

    @property
    def max_seqlen(self) -> int:
        return max(self.lengths)

    def to(self, device: torch.device) -> "Microbatch":
        moved = {
            name: value.to(device, non_blocking=True)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor)
        }
        columns = {name: value.to(device, non_blocking=True) for name, value in self.columns.items()}
        return Microbatch(**{**vars(self), **moved, "columns": columns})

    def per_sample(self, values_N: torch.Tensor) -> list[np.ndarray]:
        """Cuts values of the predicted tokens, [N] or [N, ...], into one array per sequence."""
        return np.split(values_N.cpu().numpy(), np.cumsum(self.completion_lengths)[:-1])

    def encoded_top_k(self, outputs_KN: torch.Tensor) -> list[bytes]:
        """Returns the most probable tokens of each sequence, which `outputs_KN` have in their last rows."""
        logprobs_NK, tokens_NK = outputs_KN[-self.top_k.num_rows :].T.tensor_split([self.top_k.k + 1], 1)
        return list(map(encode_top_k, self.per_sample(tokens_NK), self.per_sample(logprobs_NK)))


def assign(
    lengths: Sequence[int], *, num_ranks: int, max_tokens: int, multiple_of: int = 1, pads_rows: bool = False
) -> list[list[list[int]]]:
    """Assigns samples to ranks and micro-batches. Returns [rank][micro-batch] -> sample indices, ascending.

    Makes as few micro-batches of at most `max_tokens` tokens as possible, and puts the longest sample that is left into
    the micro-batch with the fewest tokens (LPT, Graham 1969). With `pads_rows` each sample is padded to the longest of
    its micro-batch, and the padding counts: then samples of about the same length are put together. Every rank gets
    about the same number of tokens and exactly the same number of micro-batches, because the forward of a sharded model
    is a collective. That number is a multiple of `multiple_of`, which an interleaved pipeline sets to its number of
    stages.

    Raises:
        InvalidInput: A sample is longer than `max_tokens`, there are fewer samples than ranks, or no equal split
            fits `max_tokens`.
    """
    if max(lengths) > max_tokens:
        raise InvalidInput(
            f"a sample of {max(lengths)} tokens does not fit trainer.max_tokens_per_microbatch {max_tokens}",
            field="trainer.max_tokens_per_microbatch",
        )
    if len(lengths) < num_ranks:
        raise InvalidInput(f"{len(lengths)} samples cannot be spread over {num_ranks} ranks", field="frame")
    if pads_rows:
        microbatches = _rows_by_length(lengths, num_ranks * multiple_of, max_tokens)
    else:
        microbatches = _packed(lengths, num_ranks, max_tokens, multiple_of)
    if not microbatches:
        raise InvalidInput(
            f"{len(lengths)} samples of up to {max(lengths)} tokens cannot be split into the same number of "
            f"micro-batches for each of {num_ranks} ranks; raise trainer.max_tokens_per_microbatch from {max_tokens} "
            f"to at least {2 * max(lengths)}, or make the number of samples in a mini-batch divisible by the number of "
            "ranks",
            field="trainer.max_tokens_per_microbatch",
        )
    # Deal the micro-batches to the ranks from largest to smallest, back and forth, so that the ranks' totals stay
    # close.
    microbatches.sort(key=lambda microbatch: (-microbatch[0], microbatch[1]))
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for index, (_, samples) in enumerate(microbatches):
        turn, place = divmod(index, num_ranks)
        ranks[place if turn % 2 == 0 else num_ranks - 1 - place].append(samples)
    return ranks


_Microbatches = list[tuple[int, list[int]]]
"""The tokens of each micro-batch, and its samples."""


def _packed(lengths: Sequence[int], num_ranks: int, max_tokens: int, multiple_of: int) -> _Microbatches:
    """Returns the fewest micro-batches that fit; none if that is impossible."""
    most, fewest = len(lengths) // num_ranks, -(-sum(lengths) // (max_tokens * num_ranks))
    for microbatches_per_rank in range(fewest + -fewest % multiple_of, most + 1, multiple_of):
        # LPT does not always find a packing that exists, so the next number is tried if this one does not fit.
        microbatches = _longest_first(lengths, microbatches_per_rank * num_ranks)
        if max(tokens for tokens, _ in microbatches) <= max_tokens:
            return microbatches
    return []


def _rows_by_length(lengths: Sequence[int], multiple_of: int, max_tokens: int) -> _Microbatches:
    """Returns micro-batches of neighbors in the order of length, with their padding; none if there are too few samples.

    As many samples as fit go together, from the longest on. Then the largest micro-batches are halved until the number
    is a multiple of `multiple_of`.
    """
    groups: list[list[int]] = []
    for sample in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= max_tokens:
            groups[-1].append(sample)
        else:
            groups.append([sample])
    number = len(groups) + -len(groups) % multiple_of
    if number > len(lengths):
        return []
    while len(groups) < number:
        # One of a single sample cannot be halved.
        halved = max(groups, key=lambda group: (len(group) > 1, len(group) * lengths[group[0]]))
        middle = len(halved) // 2
        groups[groups.index(halved)] = halved[:middle]
        groups.append(halved[middle:])
    return [(len(group) * lengths[group[0]], sorted(group)) for group in groups]


def _longest_first(lengths: Sequence[int], num_microbatches: int) -> _Microbatches:
    emptiest = [(0, index) for index in range(num_microbatches)]
    microbatches: _Microbatches = [(0, []) for _ in range(num_microbatches)]
    for sample in sorted(
        range(len(lengths)), key=lambda i: (-lengths[i], i)
    ):  # ties in a fixed order, so that runs repeat
        tokens, index = heapq.heappop(emptiest)
        heapq.heappush(emptiest, (tokens + lengths[sample], index))
        microbatches[index] = (tokens + lengths[sample], sorted([*microbatches[index][1], sample]))
    return microbatches


def build_microbatch(samples: pa.Table, shape: RoutedExpertsShape | None = None) -> Microbatch:
    """Packs all rows of `samples` (common.batches.SAMPLE_SCHEMA), in their order.

    `shape` is that of the model's routed experts; without it, or without routed experts in `samples`, the micro-batch
    has none.
    """
    prompts, completions = _arrays(samples, "prompt_tokens"), _arrays(samples, "tokens")
    inputs = [np.concatenate([p, c])[:-1] for p, c in zip(prompts, completions, strict=True)]
    lengths = np.array([len(sequence) for sequence in inputs])
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    predict = [
        np.arange(start + len(p) - 1, start + len(p) - 1 + len(c))
        for start, p, c in zip(cu_seqlens, prompts, completions, strict=False)
    ]
    counts = np.array([len(c) for c in completions])
    columns = {"behavior_logprobs": _flat(samples, "logprobs"), "loss_mask": np.ones(counts.sum(), np.float32)}
    for name in ("loss_mask", "advantages", "ref_logprobs", "values", "returns"):
        if samples[name].null_count == 0:
            columns[name] = _flat(samples, name)
    if "trained_tokens" in samples.column_names:  # a sample of an agent has several rows
        trained = samples["trained_tokens"].to_numpy()
    else:
        # No completion is empty (trainer/samples.py): reduceat would count the first token of the next one for it.
        trained = np.add.reduceat(columns["loss_mask"], np.cumsum(counts) - counts)
    columns["completion_length"] = np.repeat(trained, counts)
    replayed = shape if "routed_experts" in samples.column_names else None
    teacher = _teacher_top_k(samples, counts) if _has(samples, "teacher_top_k") else (None, None)
    return Microbatch(
        tokens_T=torch.from_numpy(np.concatenate(inputs).astype(np.int64)),
        positions_T=torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])),
        cu_seqlens_B1=torch.from_numpy(cu_seqlens.astype(np.int32)),
        lengths=tuple(lengths.tolist()),
        predict_N=torch.from_numpy(np.concatenate(predict)),
        targets_N=torch.from_numpy(np.concatenate(completions).astype(np.int64)),
        completion_lengths=tuple(counts.tolist()),
        columns={name: torch.from_numpy(np.array(values, dtype=np.float32)) for name, values in columns.items()},
        experts_TLK=_routed_experts(samples, replayed) if replayed else None,
        num_expert_layers=len(replayed.expert_layers) if replayed else 0,
        sampling_mask_NK=_sampling_mask(samples, counts) if _has(samples, "sampling_mask") else None,
        teacher_tokens_NK=teacher[0],
        teacher_logprobs_NK=teacher[1],
    )


def _has(samples: pa.Table, name: str) -> bool:
    return name in samples.column_names and not samples[name].null_count


def _teacher_top_k(samples: pa.Table, num_tokens: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    decoded = [decode_top_k(row.as_buffer(), n) for row, n in zip(samples["teacher_top_k"], num_tokens, strict=True)]
    tokens, logprobs = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*decoded, strict=True))
    return tokens, logprobs


def _routed_experts(samples: pa.Table, shape: RoutedExpertsShape) -> torch.Tensor:
    experts_TLK = np.concatenate([shape.decode(row.as_buffer()) for row in samples["routed_experts"]])
    # Not uint16, for which torch lacks most operators.
    return torch.from_numpy(experts_TLK if shape.dtype == np.uint8 else experts_TLK.astype(np.int32))


def _sampling_mask(samples: pa.Table, num_tokens: np.ndarray) -> torch.Tensor:
    decoded = [
        decode_sampling_masks(row.as_buffer(), n) for row, n in zip(samples["sampling_mask"], num_tokens, strict=True)
    ]
    counts_N = np.concatenate([counts for counts, _ in decoded])
    mask_NK = np.full((len(counts_N), counts_N.max()), -1, np.int32)
    mask_NK[np.arange(mask_NK.shape[1]) < counts_N[:, None]] = np.concatenate([tokens for _, tokens in decoded])
    return torch.from_numpy(mask_NK)


def _arrays(samples: pa.Table, name: str) -> list[np.ndarray]:
    return [row.values.to_numpy(zero_copy_only=False) for row in samples[name]]


def _flat(samples: pa.Table, name: str) -> np.ndarray:
    return np.concatenate(_arrays(samples, name))
