"""Computes log-probabilities and entropies from hidden states without storing all [tokens, vocabulary] logits."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from services.trainer.updates.softmax import (
    REMOVED,
    Softmax,
    TopK,
    combine,
    fused_on_gpu,
    listed_logprobs,
    local_tokens,
    most_probable,
    precision,
    statistics,
    write,
)

# The number of logits computed at a time. On CPU a few float32 copies of them exist, on GPU two in half precision.
_ENTRIES_PER_CHUNK = {"cpu": 64 << 20, "cuda": 256 << 20}
# The most logits that are kept from forward to backward. With their gradients, in half precision, they take 3 GB.
_KEPT_ENTRIES = {"cpu": 64 << 20, "cuda": 768 << 20}

# Stands for no token in a row of a sampling mask; no token of another rank is as far away.
_PADDING = -(1 << 62)


class Targets(NamedTuple):
    """Which tokens' log-probabilities are wanted at each of M positions."""

    tokens_M: torch.Tensor
    """The token that follows each position."""
    mask_MK: torch.Tensor | None = None
    """The distribution of a row is only over its own K tokens, which include its target. Negative ones are padding; a
    row that has nothing else is over the whole vocabulary."""
    others_MJ: torch.Tensor | None = None
    """J other tokens, different from each other. Negative ones are padding, and their results mean nothing."""
    top_k: TopK = TopK()
    """The most probable tokens, without gradient."""

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

    The result has the rows logprob and entropy; with J other tokens, their log-probabilities and that of all tokens
    beside them; with `top_k`, the log-probabilities of the k most probable tokens, in falling order, that of all tokens
    beside them, and the numbers of the k tokens. It is [2 + (J + 1) + (2 k + 1), M]. A token outside of the sampling
    mask is number -1. Numbers are exact in float32 up to 2^24, which no vocabulary reaches. The probability of all
    tokens beside some is a sum of its own, and not 1 less their sum, so that it is exact where it is small.

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
        local_M = local_tokens(targets.tokens_M, first, len(weight_VD))
        others_MJ = local_tokens(targets.others_MJ, first, len(weight_VD)) if targets.others_MJ is not None else None
        mask_MK = targets.mask_MK
        local_MK = None if mask_MK is None else torch.where(mask_MK < 0, _PADDING, mask_MK.long() - first)
        parts, kept_MV = [], None
        for part in _chunks(hidden_MD, weight_VD, keeps_logits):
            local, logits = local_M[part], _logits(hidden_MD, weight_VD, local_MK, part, ctx.softcap)
            top, sums = statistics(logits, local, temperature)
            # If logits are kept, this chunk is the only one.
            kept_MV = logits if keeps_logits else None
            if group:
                sums, top = combine(sums, top, local >= 0, group)
            log_sum = sums[0].log()
            rows = [torch.stack([top + log_sum, sums[2] - log_sum, log_sum - sums[1] / sums[0]])]
            softmax = Softmax(top, log_sum, temperature, group)
            if others_MJ is not None:
                rows.append(listed_logprobs(logits, others_MJ[part], softmax))
            if targets.top_k.k:
                tokens_CK = most_probable(logits, targets.top_k, first, group)
                listed = listed_logprobs(logits, local_tokens(tokens_CK, first, len(weight_VD)), softmax)
                listed[:-1].masked_fill_(tokens_CK.T < 0, 0)
                rows += [listed, tokens_CK.T.to(listed.dtype)]
            parts.append(torch.cat(rows))
            del logits
        whole_RM = torch.cat(parts, 1)
        log_rest_M = None if others_MJ is None else whole_RM[3 + others_MJ.size(1)]
        ctx.save_for_backward(
            hidden_MD, weight_VD, local_M, local_MK, others_MJ, whole_RM[2], whole_RM[0], log_rest_M, kept_MV
        )
        return whole_RM[1:].clone()

    @staticmethod
    def backward(ctx: Any, grad_RM: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        hidden_MD, weight_VD, local_M, local_MK, others_MJ, *of_softmax, kept_MV = ctx.saved_tensors
        entropy_M, log_norm_M, log_rest_M = of_softmax
        is_whole, grad_hidden = kept_MV is not None, []
        sum_VD = _megatron_sum(weight_VD) if ctx.needs_input_grad[1] else None
        # A bfloat16 sum would be rounded after every chunk instead of once.
        is_direct = sum_VD is not None and (is_whole or sum_VD.dtype == precision(weight_VD))
        grad_weight = sum_VD if is_direct else None
        # Of other tokens and, in the last row, of all tokens beside them.
        grad_listed = grad_RM[2 : 2 if others_MJ is None else 3 + others_MJ.size(1)]
        # Of the target, of the entropy, and of all log-probabilities together.
        grad_3M = torch.cat([grad_RM[:2], grad_RM[:1] + grad_listed.sum(0)])
        for part in _chunks(hidden_MD, weight_VD, is_whole):
            logits = kept_MV if is_whole else _logits(hidden_MD, weight_VD, local_MK, part, ctx.softcap)
            # Copies, because the compiler would make code for the places of views in what they are views of.
            local, log_norm, entropy, grad_3 = (x[..., part].clone() for x in (local_M, log_norm_M, entropy_M, grad_3M))
            rest = None if others_MJ is None else torch.stack([log_rest_M[part], grad_listed[-1, part]])
            position = _Position(local, log_norm, entropy, grad_3, rest)
            grad = _gradient(logits, position, ctx.temperature)
            if others_MJ is not None:
                _set_others(grad, logits, others_MJ[part], grad_listed[:-1, part], position, ctx.temperature)
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
    rest_2C: torch.Tensor | None
    """The log-probability of all tokens beside the others, and its gradient."""


def _megatron_sum(weight_VD: torch.Tensor) -> torch.Tensor | None:
    """Returns the buffer in which Megatron sums the weight's gradients, [V, D], or None if it cannot be added to.

    A weight that is tied to the embedding also has the embedding's gradient, which Megatron must add.
    """
    is_tied = getattr(weight_VD, "zero_out_wgrad", False) or getattr(weight_VD, "shared_embedding", False)
    sum_VD = getattr(weight_VD, "main_grad", None)
    if is_tied or sum_VD is None or sum_VD.dtype not in (weight_VD.dtype, precision(weight_VD)):
        return None
    return sum_VD


def _logits(
    hidden_MD: torch.Tensor, weight_VD: torch.Tensor, local_MK: torch.Tensor | None, part: slice, softcap: float
) -> torch.Tensor:
    """Returns the logits of a chunk, [C, V], REMOVED where `local_MK` does not have the token.

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
    return logits_CV.masked_fill_(~is_kept_CV, REMOVED)


@fused_on_gpu
def _gradient(logits_CV: torch.Tensor, position: _Position, temperature: float) -> torch.Tensor:
    """Returns d loss / d logits in the logits' dtype: d logprob = onehot - p, d entropy = -p (log p + entropy).

    At other tokens than the target it means nothing if they have gradients of their own; see `_set_others`.
    """
    tokens = torch.arange(logits_CV.size(1), device=logits_CV.device)
    logprobs, grad = _common_gradient(logits_CV, tokens, position, temperature)
    if position.rest_2C is not None:
        log_rest, grad_rest = position.rest_2C[..., None]
        # The share of a token in the rest is at most 1; only tokens that are not in it would have more.
        grad = grad + (logprobs - log_rest).clamp(max=0).exp() * grad_rest
    return (grad / temperature).to(logits_CV.dtype)


def _common_gradient(
    logits: torch.Tensor, tokens: torch.Tensor, position: _Position, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the log-probabilities of `tokens`, [C, n], and what each logit gets from target and softmax."""
    logprobs = logits.to(precision(logits)) / temperature - position.log_norm_C[:, None]
    grad_logprob, grad_entropy, grad_all = position.grad_3C[..., None]
    spread = logprobs.exp() * (grad_all + grad_entropy * (logprobs + position.entropy_C[:, None]))
    return logprobs, torch.where(position.local_C[:, None] == tokens, grad_logprob, 0) - spread


def _set_others(
    grad_CV: torch.Tensor,
    logits_CV: torch.Tensor,
    others_CJ: torch.Tensor,
    grad_JC: torch.Tensor,
    position: _Position,
    temperature: float,
) -> None:
    """Sets the gradients at the other tokens' logits, in place.

    They are computed as in `_gradient`, and rounded once. If the onehot was added to what is already rounded, the small
    gradient of a token of high probability would be lost.
    """
    logits_CJ = logits_CV.gather(1, others_CJ.clamp(min=0))
    _, grad_CJ = _common_gradient(logits_CJ, others_CJ, position, temperature)
    write(grad_CV, others_CJ, ((grad_CJ + grad_JC.T) / temperature).to(grad_CV.dtype))


def _plus_product(
    total: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor, *, is_only: bool
) -> torch.Tensor:
    """Returns total + left @ right, in the memory of `total`, which may have a higher precision.

    Without a total it returns the product, in a higher precision unless it is the only one.
    """
    if total is None and is_only:
        return left @ right
    if total is None:
        total = torch.zeros(len(left), right.size(1), dtype=precision(left), device=left.device)
    if left.is_cuda and total.dtype != left.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    elif left.is_cuda:
        total.addmm_(left, right)
    else:
        total += left @ right
    return total


def _chunks(hidden_MD: torch.Tensor, weight_VD: torch.Tensor, is_whole: bool) -> Iterator[slice]:
    size = len(hidden_MD) if is_whole else _ENTRIES_PER_CHUNK[hidden_MD.device.type] // weight_VD.size(0)
    # At least one row and one chunk: a context-parallel rank without predictions has gradients of 0, not none.
    size = max(1, size)
    return (slice(begin, begin + size) for begin in range(0, max(1, len(hidden_MD)), size))
