"""Computes log-probabilities and entropies from hidden states without storing all [tokens, vocabulary] logits."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, ParamSpec, TypeVar

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


# The number of logits computed at a time. On CPU a few float32 copies of them exist, on GPU two in half precision.
_ENTRIES_PER_CHUNK = {"cpu": 64 << 20, "cuda": 256 << 20}
# The most logits that are kept from forward to backward. With their gradients, in half precision, they take 3 GB.
_KEPT_ENTRIES = {"cpu": 64 << 20, "cuda": 768 << 20}

# Stands for no token in a row of a sampling mask; no token of another rank is as far away.
_PADDING = -(1 << 62)

# The logit of a token outside of a sampling mask. Its probability is 0, and unlike those of -inf its products with 0
# are 0 too.
_REMOVED = -1e30


class Targets(NamedTuple):
    """Which tokens' log-probabilities are wanted at each of M positions."""

    tokens_M: torch.Tensor
    """The token that follows each position."""
    mask_MK: torch.Tensor | None = None
    """The distribution of a row is only over its own K tokens, which include its target. Negative ones are padding; a
    row that has nothing else is over the whole vocabulary."""
    others_MJ: torch.Tensor | None = None
    """J other tokens, different from each other. Those that are negative are padding, and mean nothing."""
    top_k: int = 0
    """How many of the most probable tokens are wanted too, without gradient."""

    def at(self, rows: torch.Tensor) -> "Targets":
        """Returns those of some positions."""
        mask_MK, others_MJ = (None if values is None else values[rows] for values in (self.mask_MK, self.others_MJ))
        return Targets(self.tokens_M[rows], mask_MK, others_MJ, self.top_k)


class _Scale(NamedTuple):
    temperature: float
    softcap: float
    keeps_logits: bool


def linear_logprobs(
    hidden_MD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets: Targets,
    temperature: float,
    group: dist.ProcessGroup | None = None,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Returns each target's log-probability and the entropy at its position, in nats, and what else `targets` asks for.

    The result has the rows logprob, entropy, J log-probabilities of the other tokens, the log-probabilities of the
    `top_k` most probable tokens, in falling order, and the numbers of these tokens, [2 + J + 2 top_k, M]. A token
    outside of the sampling mask is number -1. Numbers are exact in float32 up to 2^24, which no vocabulary reaches.

    The distribution is softmax(hidden W^T / temperature). The result is float64 if the weight is, else float32.

    With a `softcap`, logits are softcap * tanh(hidden W^T / softcap) (Gemma 2, 2408.00118).

    With a `group`, its rank r holds rows r * V to (r + 1) * V of the output weight. The result is then the same on all
    ranks, and the gradient of `hidden_MD` is this rank's part, which the caller sums over the group.

    If Megatron sums the gradients of `weight_VD` in a buffer, the backward pass adds to that buffer itself; the
    weight's gradient then has no values. This must not depend on the number of tokens, because Megatron looks only once
    an update whether it has to add the gradients itself.
    """
    # Without gradients too, so that scoring and training multiply the same shapes and round alike.
    keeps_logits = hidden_MD.size(0) * weight_VD.size(0) <= _KEPT_ENTRIES[hidden_MD.device.type]
    return _LinearLogprobs.apply(hidden_MD, weight_VD, targets, _Scale(temperature, softcap, keeps_logits), group)


class _LinearLogprobs(torch.autograd.Function):
    """Saves its inputs, two numbers per token and, if there are few, the logits.

    Otherwise the backward pass recomputes the logits, chunk by chunk.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: torch.Tensor,
        weight_VD: torch.Tensor,
        targets: Targets,
        scale: _Scale,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        temperature, ctx.softcap, keeps_logits = scale
        ctx.temperature = temperature
        first = dist.get_rank(group) * weight_VD.size(0) if group else 0
        local_M = _local(targets.tokens_M, first, len(weight_VD))
        others_MJ = _local(targets.others_MJ, first, len(weight_VD)) if targets.others_MJ is not None else None
        mask_MK = targets.mask_MK
        local_MK = None if mask_MK is None else torch.where(mask_MK < 0, _PADDING, mask_MK.long() - first)
        rows, kept_MV = [], None
        for part in _chunks(hidden_MD, weight_VD, keeps_logits):
            local, logits = local_M[part], _logits(hidden_MD, weight_VD, local_MK, part, ctx.softcap)
            top, sums = _statistics(logits, local, temperature)
            kept_MV = logits if keeps_logits else None
            if group:
                sums, top = _combine(sums, top, local >= 0, group)
            log_sum = sums[0].log()
            log_norm = top + log_sum
            parts = [torch.stack([log_norm, sums[2] - log_sum, log_sum - sums[1] / sums[0]])]
            if others_MJ is not None:
                parts.append(_picked(logits, others_MJ[part], temperature, group) - log_norm)
            if targets.top_k:
                parts += _most_probable(logits, targets.top_k, first, group).scores(temperature, log_norm)
            rows.append(torch.cat(parts))
            del logits
        log_norm_M, logprobs_M, entropy_M, *more = torch.cat(rows, 1)
        ctx.save_for_backward(hidden_MD, weight_VD, local_M, local_MK, others_MJ, entropy_M, log_norm_M, kept_MV)
        return torch.stack([logprobs_M, entropy_M, *more])

    @staticmethod
    def backward(ctx: Any, grad_RM: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        hidden_MD, weight_VD, local_M, local_MK, others_MJ, entropy_M, log_norm_M, kept_MV = ctx.saved_tensors
        is_whole, grad_hidden = kept_MV is not None, []
        sum_VD = _megatron_sum(weight_VD) if ctx.needs_input_grad[1] else None
        # A bfloat16 sum would be rounded after every chunk instead of once.
        is_direct = sum_VD is not None and (is_whole or sum_VD.dtype == _precision(weight_VD))
        grad_weight = sum_VD if is_direct else None
        grad_JM = grad_RM[2:2] if others_MJ is None else grad_RM[2 : 2 + others_MJ.size(1)]
        # Of the target, of the entropy, and of all log-probabilities together.
        grad_3M = torch.cat([grad_RM[:2], grad_RM[:1] + grad_JM.sum(0)])
        for part in _chunks(hidden_MD, weight_VD, is_whole):
            logits = kept_MV if is_whole else _logits(hidden_MD, weight_VD, local_MK, part, ctx.softcap)
            # Copies, because the compiler would make code for the places of views in what they are views of.
            position = _Position(*(x[..., part].clone() for x in (local_M, log_norm_M, entropy_M, grad_3M)))
            grad = _gradient(logits, *position, ctx.temperature)
            if others_MJ is not None:
                _set_others(grad, logits, others_MJ[part], grad_JM[:, part], position, ctx.temperature)
            if ctx.softcap:  # the derivative of the cap; a removed token has no gradient, and its logit is no cap's
                grad *= (1 - (logits / ctx.softcap).square()).clamp_(min=0)
            del logits
            grad_hidden.append(grad @ weight_VD)
            if ctx.needs_input_grad[1]:
                grad_weight = _plus_product(grad_weight, grad.T, hidden_MD[part], is_only=is_whole)
        if sum_VD is not None:
            if grad_weight is not None and not is_direct:
                sum_VD += grad_weight
            # As for Megatron's own layers (tensor_parallel/layers.py), its hook drops what is returned. With None,
            # autograd would run the hook, which starts reductions, in another thread than the other hooks.
            weight_VD.grad_added_to_main_grad = True
            grad_weight = torch.empty_like(weight_VD)
        elif grad_weight is not None:
            grad_weight = grad_weight.to(weight_VD.dtype)
        return torch.cat(grad_hidden), grad_weight, None, None, None


class _Position(NamedTuple):
    """What the gradient of a chunk's logits needs to know of each position."""

    local_C: torch.Tensor
    log_norm_C: torch.Tensor
    entropy_C: torch.Tensor
    grad_3C: torch.Tensor


def _megatron_sum(weight_VD: torch.Tensor) -> torch.Tensor | None:
    """Returns the buffer in which Megatron sums the weight's gradients, [V, D], or None if it cannot be added to.

    A weight that is tied to the embedding also has the embedding's gradient, which Megatron must add.
    """
    is_tied = getattr(weight_VD, "zero_out_wgrad", False) or getattr(weight_VD, "shared_embedding", False)
    sum_VD = getattr(weight_VD, "main_grad", None)
    if is_tied or sum_VD is None or sum_VD.dtype not in (weight_VD.dtype, _precision(weight_VD)):
        return None
    return sum_VD


def _logits(
    hidden_MD: torch.Tensor, weight_VD: torch.Tensor, local_MK: torch.Tensor | None, part: slice, softcap: float
) -> torch.Tensor:
    """Returns the logits of a chunk, [C, V], _REMOVED where `local_MK` does not have the token.

    `local_MK` counts from this rank's first token, so that those of other ranks are negative or at least V.
    """
    logits_CV = hidden_MD[part] @ weight_VD.T
    if softcap:
        logits_CV = logits_CV.div_(softcap).tanh_().mul_(softcap)
    if local_MK is None:
        return logits_CV
    local_CK, size = local_MK[part], weight_VD.size(0)
    column_CK = torch.where((local_CK >= 0) & (local_CK < size), local_CK, size)  # one more column takes the others
    is_kept_CV = torch.zeros(len(logits_CV), size + 1, dtype=torch.bool, device=logits_CV.device)
    is_kept_CV = is_kept_CV.scatter_(1, column_CK, True)[:, :size] | (local_CK == _PADDING).all(1, keepdim=True)
    return logits_CV.masked_fill_(~is_kept_CV, _REMOVED)


@fused_on_gpu
def _statistics(logits_CV: torch.Tensor, local_C: torch.Tensor, temperature: float) -> tuple[torch.Tensor, ...]:
    """Returns statistics over this rank's part of the vocabulary of z = logits / temperature.

    The first result is the maximum of z, [C]. The second, [3, C], has the sum of exp(z - max), the sum of
    (z - max) exp(z - max), and z - max at the target, which is meaningless if the target is on another rank.
    """
    scores = logits_CV.to(_precision(logits_CV)) / temperature
    top = scores.amax(-1)
    scores = scores - top[:, None]
    weights = scores.exp()
    picked = scores.gather(1, local_C.clamp(min=0)[:, None])[:, 0]
    return top, torch.stack([weights.sum(-1), (weights * scores).sum(-1), picked])


@fused_on_gpu
def _gradient(
    logits_CV: torch.Tensor,
    local_C: torch.Tensor,
    log_norm_C: torch.Tensor,
    entropy_C: torch.Tensor,
    grad_3C: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """Returns d loss / d logits in the logits' dtype: d logprob = onehot - p, d entropy = -p (log p + entropy).

    It lacks the onehots of other tokens than the target.
    """
    logprobs = logits_CV.to(_precision(logits_CV)) / temperature - log_norm_C[:, None]
    grad_logprob, grad_entropy, grad_all = grad_3C[..., None]
    is_target = local_C[:, None] == torch.arange(logits_CV.size(1), device=logits_CV.device)
    spread = logprobs.exp() * (grad_all + grad_entropy * (logprobs + entropy_C[:, None]))
    return ((torch.where(is_target, grad_logprob, 0) - spread) / temperature).to(logits_CV.dtype)


def _set_others(
    grad_CV: torch.Tensor,
    logits_CV: torch.Tensor,
    others_CJ: torch.Tensor,
    grad_JC: torch.Tensor,
    position: _Position,
    temperature: float,
) -> None:
    """Sets the gradients at the other tokens' logits, in place.

    They are computed as a whole, as in `_gradient`, and rounded once. If the onehot was added to what is already
    rounded, the small gradient of a token of high probability would be lost.
    """
    row, place = (others_CJ >= 0).nonzero(as_tuple=True)
    token = others_CJ[row, place]
    logprob = logits_CV[row, token].to(_precision(logits_CV)) / temperature - position.log_norm_C[row]
    grad_logprob, grad_entropy, grad_all = position.grad_3C[:, row]
    onehots = grad_JC[place, row] + torch.where(token == position.local_C[row], grad_logprob, 0)
    spread = logprob.exp() * (grad_all + grad_entropy * (logprob + position.entropy_C[row]))
    grad_CV[row, token] = ((onehots - spread) / temperature).to(grad_CV.dtype)


def _local(tokens: torch.Tensor, first: int, size: int) -> torch.Tensor:
    """Returns where this rank has `tokens`, which is -1 for those of another rank, and for padding."""
    local = tokens.long() - first
    return torch.where((local >= 0) & (local < size), local, -1)


def _picked(
    logits_CV: torch.Tensor, local_CJ: torch.Tensor, temperature: float, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Returns logits / temperature of tokens, [J, C]; 0 where no rank has the token."""
    picked_CJ = logits_CV.gather(1, local_CJ.clamp(min=0)).to(_precision(logits_CV)) / temperature
    picked_CJ = torch.where(local_CJ >= 0, picked_CJ, 0)
    if group:
        dist.all_reduce(picked_CJ, group=group)
    return picked_CJ.T


class _MostProbable(NamedTuple):
    logits_CK: torch.Tensor
    tokens_CK: torch.Tensor

    def scores(self, temperature: float, log_norm_C: torch.Tensor) -> list[torch.Tensor]:
        """Returns the tokens' log-probabilities and numbers, both [K, C]."""
        is_kept_CK = self.logits_CK > _REMOVED / 2
        logprobs_CK = self.logits_CK / temperature - log_norm_C[:, None]
        tokens_CK = torch.where(is_kept_CK, self.tokens_CK, -1).to(logprobs_CK.dtype)
        return [torch.where(is_kept_CK, logprobs_CK, 0).T, tokens_CK.T]


def _most_probable(logits_CV: torch.Tensor, k: int, first: int, group: dist.ProcessGroup | None) -> _MostProbable:
    """Returns the `k` largest logits of the whole vocabulary, of which this rank's part begins with token `first`."""
    logits, tokens = logits_CV.topk(min(k, logits_CV.size(1)))
    logits, tokens = logits.to(_precision(logits_CV)), tokens + first
    if group is None:
        return _MostProbable(logits, tokens)
    of_all = [[torch.empty_like(own) for _ in range(group.size())] for own in (logits, tokens)]
    for parts, own in zip(of_all, (logits, tokens), strict=True):
        dist.all_gather(parts, own.contiguous(), group=group)
    logits, tokens = (torch.cat(parts, 1) for parts in of_all)
    logits, places = logits.topk(k)
    return _MostProbable(logits, tokens.gather(1, places))


def _combine(
    sums_3C: torch.Tensor, own_top_C: torch.Tensor, is_local_C: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combines the ranks' statistics. Returns the sums, relative to the maximum over all ranks, and that maximum."""
    top_C = own_top_C.clone()
    dist.all_reduce(top_C, op=dist.ReduceOp.MAX, group=group)
    (weights_C, weighted_C, picked_C), below_C = sums_3C, own_top_C - top_C
    scale_C = below_C.exp()
    weighted_C, picked_C = weighted_C + weights_C * below_C, torch.where(is_local_C, picked_C + below_C, 0)
    sums_3C = torch.stack([weights_C * scale_C, weighted_C * scale_C, picked_C])
    dist.all_reduce(sums_3C, group=group)
    return sums_3C, top_C


def _plus_product(
    total: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor, *, is_only: bool
) -> torch.Tensor:
    """Returns total + left @ right, in the memory of `total`, which may have a higher precision.

    Without a total it returns the product, in a higher precision unless it is the only one.
    """
    if total is None and is_only:
        return left @ right
    if total is None:
        total = torch.zeros(len(left), right.size(1), dtype=_precision(left), device=left.device)
    if left.is_cuda and total.dtype != left.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    elif left.is_cuda:
        total.addmm_(left, right)
    else:
        total += left @ right
    return total


def _chunks(hidden_MD: torch.Tensor, weight_VD: torch.Tensor, is_whole: bool) -> Iterator[slice]:
    size = len(hidden_MD) if is_whole else _ENTRIES_PER_CHUNK[hidden_MD.device.type] // weight_VD.size(0)
    size = max(1, size)
    return (slice(begin, begin + size) for begin in range(0, max(1, len(hidden_MD)), size))


def _precision(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
