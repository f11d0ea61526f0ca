"""Computes parts of a softmax whose vocabulary may be split over ranks: sums, and log-probabilities of some tokens."""

import functools
from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def fused_on_gpu(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Returns `function`, compiled for calls whose first argument is on a GPU. CPU calls run it as written.

    A host without GPUs therefore needs no compiler.
    """

    @functools.cache
    def compiled() -> Callable[Arguments, Result]:
        return torch.compile(function, dynamic=True)  # not at decoration, because it imports the compiler

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        first = args[0]
        is_on_gpu = isinstance(first, torch.Tensor) and first.is_cuda
        return (compiled() if is_on_gpu else function)(*args, **kwargs)

    return call


# The logit of a token outside of a sampling mask. Its probability is 0, and unlike those of -inf its products with 0
# are 0 too.
REMOVED = -1e30


class TopK(NamedTuple):
    """Asks for the k most probable of the first `vocab_size` tokens."""

    k: int = 0
    vocab_size: int = 0

    @property
    def num_rows(self) -> int:
        """How many rows they have in a model's outputs: k + 1 log-probabilities, and k numbers of tokens."""
        return 2 * self.k + 1 if self.k else 0


class Softmax(NamedTuple):
    """The normalization of a chunk: its largest logit, and the logarithm of the sum of exponentials relative to that,
    both [C]."""

    top_C: torch.Tensor
    log_sum_C: torch.Tensor
    temperature: float
    group: dist.ProcessGroup | None


@fused_on_gpu
def statistics(logits_CV: torch.Tensor, local_C: torch.Tensor, temperature: float) -> tuple[torch.Tensor, ...]:
    """Returns statistics over this rank's part of the vocabulary of z = logits / temperature.

    The first result is the maximum of z, [C]. The second, [3, C], has the sum of exp(z - max), the sum of
    (z - max) exp(z - max), and z - max at the target, which is meaningless if the target is on another rank.
    """
    scores = logits_CV.to(precision(logits_CV)) / temperature
    top = scores.amax(-1)
    scores = scores - top[:, None]
    weights = scores.exp()
    picked = scores.gather(1, local_C.clamp(min=0)[:, None])[:, 0]
    return top, torch.stack([weights.sum(-1), (weights * scores).sum(-1), picked])


def combine(
    sums_3C: torch.Tensor, own_top_C: torch.Tensor, is_local_C: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combines the ranks' statistics. Returns the sums, relative to the maximum over all ranks, and that maximum."""
    top_C = own_top_C.clone()
    dist.all_reduce(top_C, op=dist.ReduceOp.MAX, group=group)
    # The sums are relative to each rank's own maximum: with z - top = (z - own_top) + below, they become relative to
    # that of all.
    (weights_C, weighted_C, picked_C), below_C = sums_3C, own_top_C - top_C
    scale_C = below_C.exp()
    weighted_C, picked_C = weighted_C + weights_C * below_C, torch.where(is_local_C, picked_C + below_C, 0)
    sums_3C = torch.stack([weights_C * scale_C, weighted_C * scale_C, picked_C])
    dist.all_reduce(sums_3C, group=group)
    return sums_3C, top_C


def listed_logprobs(logits_CV: torch.Tensor, local_CJ: torch.Tensor, softmax: Softmax) -> torch.Tensor:
    """Returns the log-probabilities of tokens, and that of all tokens beside them, [J + 1, C]."""
    own_CJ = logits_CV.gather(1, local_CJ.clamp(min=0))
    picked_CJ = torch.where(local_CJ >= 0, own_CJ.to(precision(logits_CV)) / softmax.temperature, 0)
    # In place, and undone below: logits are too large to copy.
    write(logits_CV, local_CJ, torch.full_like(own_CJ, REMOVED))
    none_C = torch.full_like(local_CJ[:, 0], -1)
    rest_top_C, rest_sums_3C = statistics(logits_CV, none_C, softmax.temperature)
    write(logits_CV, local_CJ, own_CJ)
    if softmax.group:
        dist.all_reduce(picked_CJ, group=softmax.group)
        rest_sums_3C, rest_top_C = combine(rest_sums_3C, rest_top_C, none_C >= 0, softmax.group)
    # In two differences: the sum of both would be rounded at the size of a logit.
    scores = torch.cat([picked_CJ.T - softmax.top_C, (rest_top_C - softmax.top_C + rest_sums_3C[0].log())[None]])
    return scores - softmax.log_sum_C


def most_probable(logits_CV: torch.Tensor, top_k: TopK, first: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Returns the numbers of the tokens with the largest logits, [C, k]; this rank's part begins with token `first`."""
    listed = logits_CV[:, : max(0, top_k.vocab_size - first)]
    logits, tokens = listed.topk(min(top_k.k, listed.size(1)))
    tokens = torch.where(logits > REMOVED / 2, tokens + first, -1)
    if group is None:
        return tokens
    # Every rank sends k, because others may have fewer in the vocabulary.
    missing = top_k.k - tokens.size(1)
    of_all = []
    for own, filler in ((logits, -torch.inf), (tokens, -1)):
        padded = torch.nn.functional.pad(own, (0, missing), value=filler)
        parts = [torch.empty_like(padded) for _ in range(group.size())]
        dist.all_gather(parts, padded, group=group)
        of_all.append(torch.cat(parts, 1))
    return of_all[1].gather(1, of_all[0].topk(top_k.k).indices)


def write(matrix_CV: torch.Tensor, local_CJ: torch.Tensor, values_CJ: torch.Tensor) -> None:
    """Writes values at the tokens that this rank has, in place.

    Selecting these tokens would make the host wait for the GPU, which alone knows how many there are. So the places of
    all other tokens write too: what the first of these tokens in their row writes or, in a row without any, what is
    there already.
    """
    first_C1 = (local_CJ >= 0).int().argmax(1, keepdim=True)
    slots_CJ = torch.where(local_CJ >= 0, torch.arange(local_CJ.size(1), device=local_CJ.device), first_C1)
    tokens_CJ = local_CJ.gather(1, slots_CJ)
    places_CJ = tokens_CJ.clamp(min=0)
    matrix_CV.scatter_(
        1, places_CJ, torch.where(tokens_CJ >= 0, values_CJ.gather(1, slots_CJ), matrix_CV.gather(1, places_CJ))
    )


def local_tokens(tokens: torch.Tensor, first: int, size: int) -> torch.Tensor:
    """Returns where this rank has `tokens`, which is -1 for those of another rank, and for padding."""
    local = tokens.long() - first
    return torch.where((local >= 0) & (local < size), local, -1)


def precision(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
