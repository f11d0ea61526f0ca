"""Log-probability and entropy straight from hidden states: [tokens, vocabulary] never exists whole."""

from typing import Any

import torch
import torch.distributed as dist

# Logits exist for this many entries at a time, in float32 twice or thrice over.
_ENTRIES_PER_CHUNK = 64 << 20


def linear_logprobs(
    hidden_MD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_M: torch.Tensor,
    temperature: float,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Log-probability of each target and entropy, in nats, at it, [2, M], of softmax(hidden W^T / temperature).

    The result is float32, or float64 like the weight. With a `group`, rank r of it holds rows r * V to (r + 1) * V of
    the output weight, the answer is the same on all, and the gradient of `hidden_MD` is this rank's part, to be summed
    over the group.
    """
    return _LinearLogprobs.apply(hidden_MD, weight_VD, targets_M, temperature, group)


class _LinearLogprobs(torch.autograd.Function):
    """Saves its inputs and two numbers per token; the backward computes the logits again, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_M: torch.Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        ctx.temperature, ctx.first = temperature, dist.get_rank(group) * weight_VD.size(0) if group else 0
        scores = []
        for hidden, targets in _chunks(hidden_MD, targets_M, weight_VD):
            logits = _logits(hidden, weight_VD, temperature)
            top = logits.amax(-1)
            if group:
                dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
            logits -= top[:, None]
            local, is_local = _locate(targets, ctx.first, weight_VD.size(0))
            picked = torch.where(is_local, logits.gather(1, local[:, None])[:, 0], 0)
            weights = logits.exp()
            sums = torch.stack([weights.sum(-1), (weights * logits).sum(-1), picked])
            if group:
                dist.all_reduce(sums, group=group)
            log_sum = sums[0].log()
            scores.append(torch.stack([sums[2] - log_sum, log_sum - sums[1] / sums[0], top + log_sum]))
        logprobs_M, entropy_M, log_norm_M = torch.cat(scores, 1)
        ctx.save_for_backward(hidden_MD, weight_VD, targets_M, entropy_M, log_norm_M)
        return torch.stack([logprobs_M, entropy_M])

    @staticmethod
    def backward(ctx: Any, grad_2M: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        hidden_MD, weight_VD, targets_M, entropy_M, log_norm_M = ctx.saved_tensors
        needs_weight = ctx.needs_input_grad[1]
        grad_weight = torch.zeros_like(weight_VD, dtype=_precision(weight_VD)) if needs_weight else None
        grad_hidden, begin = [], 0
        for hidden, targets in _chunks(hidden_MD, targets_M, weight_VD):
            part = slice(begin, begin := begin + len(targets))
            logprobs = _logits(hidden, weight_VD, ctx.temperature) - log_norm_M[part, None]
            # d logprob / d logits = onehot - p;  d entropy / d logits = -p (log p + entropy)
            grad_logprob, grad_entropy = grad_2M[0, part, None], grad_2M[1, part, None]
            grad = -logprobs.exp() * (grad_logprob + grad_entropy * (logprobs + entropy_M[part, None]))
            local, is_local = _locate(targets, ctx.first, weight_VD.size(0))
            grad.scatter_add_(1, local[:, None], torch.where(is_local, grad_2M[0, part], 0)[:, None])
            grad = (grad / ctx.temperature).to(hidden.dtype)
            grad_hidden.append(grad @ weight_VD)
            if grad_weight is not None:
                grad_weight += grad.T @ hidden
        weight = None if grad_weight is None else grad_weight.to(weight_VD.dtype)
        return torch.cat(grad_hidden), weight, None, None, None


def _chunks(hidden_MD: torch.Tensor, targets_M: torch.Tensor, weight_VD: torch.Tensor) -> Any:
    size = max(1, _ENTRIES_PER_CHUNK // weight_VD.size(0))
    return zip(hidden_MD.split(size), targets_M.split(size), strict=True)


def _logits(hidden_MD: torch.Tensor, weight_VD: torch.Tensor, temperature: float) -> torch.Tensor:
    return (hidden_MD @ weight_VD.T).to(_precision(weight_VD)) / temperature


def _precision(weight_VD: torch.Tensor) -> torch.dtype:
    return torch.promote_types(weight_VD.dtype, torch.float32)


def _locate(targets_M: torch.Tensor, first: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each target's row on this rank, clamped, and whether it is there at all."""
    local = targets_M - first
    return local.clamp(0, size - 1), (local >= 0) & (local < size)
