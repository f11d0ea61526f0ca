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


def linear_logprobs(
    hidden_MD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_M: torch.Tensor,
    temperature: float,
    group: dist.ProcessGroup | None = None,
    mask_MK: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns each target's log-probability and the entropy at its position, [2, M], in nats.

    The distribution is softmax(hidden W^T / temperature). The result is float64 if the weight is, else float32.

    With `mask_MK`, that of a row is only over its own K tokens, which include its target. Negative ones are padding; a
    row that has nothing else is over the whole vocabulary.

    With a `group`, its rank r holds rows r * V to (r + 1) * V of the output weight. The result is then the same on all
    ranks, and the gradient of `hidden_MD` is this rank's part, which the caller sums over the group.

    If Megatron sums the gradients of `weight_VD` in a buffer, the backward pass adds to that buffer itself; the
    weight's gradient then has no values. This must not depend on the number of tokens, because Megatron looks only once
    an update whether it has to add the gradients itself.
    """
    # Without gradients too, so that scoring and training multiply the same shapes and round alike.
    keeps_logits = hidden_MD.size(0) * weight_VD.size(0) <= _KEPT_ENTRIES[hidden_MD.device.type]
    wanted = _Wanted(targets_M, mask_MK, keeps_logits, softcap=0.0)
    return _LinearLogprobs.apply(hidden_MD, weight_VD, wanted, temperature, group)


def capped_logprobs(
    hidden_MD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_M: torch.Tensor,
    temperature: float,
    softcap: float,
    mask_MK: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns what `linear_logprobs` does, for logits softcap * tanh(hidden W^T / softcap) (Gemma 2, 2408.00118).

    0 is no cap.
    """
    keeps_logits = hidden_MD.size(0) * weight_VD.size(0) <= _KEPT_ENTRIES[hidden_MD.device.type]
    wanted = _Wanted(targets_M, mask_MK, keeps_logits, softcap)
    return _LinearLogprobs.apply(hidden_MD, weight_VD, wanted, temperature, None)


class _Wanted(NamedTuple):
    targets_M: torch.Tensor
    mask_MK: torch.Tensor | None
    keeps_logits: bool
    softcap: float


class _LinearLogprobs(torch.autograd.Function):
    """Saves its inputs, two numbers per token and, if there are few, the logits.

    Otherwise the backward pass recomputes the logits, chunk by chunk.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: torch.Tensor,
        weight_VD: torch.Tensor,
        wanted: _Wanted,
        temperature: float,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        targets_M, mask_MK, keeps_logits, ctx.softcap = wanted
        ctx.temperature, first = temperature, dist.get_rank(group) * weight_VD.size(0) if group else 0
        local_M = targets_M - first
        local_M = torch.where((local_M >= 0) & (local_M < weight_VD.size(0)), local_M, -1)  # -1: on another rank
        local_MK = None if mask_MK is None else torch.where(mask_MK < 0, _PADDING, mask_MK.long() - first)
        scores, kept_MV = [], None
        for part in _chunks(hidden_MD, weight_VD, keeps_logits):
            local, logits = local_M[part], _logits(hidden_MD, weight_VD, local_MK, part, ctx.softcap)
            top, sums = _statistics(logits, local, temperature)
            kept_MV = logits if keeps_logits else None
            del logits
            if group:
                sums, top = _combine(sums, top, local >= 0, group)
            log_sum = sums[0].log()
            scores.append(torch.stack([sums[2] - log_sum, log_sum - sums[1] / sums[0], top + log_sum]))
        logprobs_M, entropy_M, log_norm_M = torch.cat(scores, 1)
        ctx.save_for_backward(hidden_MD, weight_VD, local_M, local_MK, entropy_M, log_norm_M, kept_MV)
        return torch.stack([logprobs_M, entropy_M])

    @staticmethod
    def backward(ctx: Any, grad_2M: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        hidden_MD, weight_VD, local_M, local_MK, entropy_M, log_norm_M, kept_MV = ctx.saved_tensors
        is_whole, grad_hidden = kept_MV is not None, []
        sum_VD = _megatron_sum(weight_VD) if ctx.needs_input_grad[1] else None
        # A bfloat16 sum would be rounded after every chunk instead of once.
        is_direct = sum_VD is not None and (is_whole or sum_VD.dtype == _precision(weight_VD))
        grad_weight = sum_VD if is_direct else None
        for part in _chunks(hidden_MD, weight_VD, is_whole):
            logits = kept_MV if is_whole else _logits(hidden_MD, weight_VD, local_MK, part, ctx.softcap)
            # Copies, because the compiler would make code for the places of views in what they are views of.
            local_C, log_norm_C, entropy_C, grad_2C = (
                x[..., part].clone() for x in (local_M, log_norm_M, entropy_M, grad_2M)
            )
            grad = _gradient(logits, local_C, log_norm_C, entropy_C, grad_2C, ctx.temperature)
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
    grad_2C: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """Returns d loss / d logits in the logits' dtype: d logprob = onehot - p, d entropy = -p (log p + entropy)."""
    logprobs = logits_CV.to(_precision(logits_CV)) / temperature - log_norm_C[:, None]
    grad_logprob, grad_entropy = grad_2C[0, :, None], grad_2C[1, :, None]
    is_target = local_C[:, None] == torch.arange(logits_CV.size(1), device=logits_CV.device)
    spread = logprobs.exp() * (grad_logprob + grad_entropy * (logprobs + entropy_C[:, None]))
    return ((torch.where(is_target, grad_logprob, 0) - spread) / temperature).to(logits_CV.dtype)


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
