"""What losses are made of."""

from dataclasses import dataclass

import torch

from services.common.config.loss import LossConfig


@dataclass(frozen=True)
class Totals:
    """Counts over the whole mini-batch, all ranks and micro-batches together."""

    num_tokens: int
    num_sequences: int
    max_completion_tokens: int


def token_weights(config: LossConfig, totals: Totals, completion_length_N: torch.Tensor) -> torch.Tensor:
    """Weight [N] of every token, so that a plain sum over the mini-batch is the mean that `aggregation` names."""
    ones = torch.ones_like(completion_length_N)
    if config.aggregation == "token_mean":
        return ones / totals.num_tokens
    if config.aggregation == "seq_mean_token_mean":
        return 1 / (totals.num_sequences * completion_length_N)
    return ones / (totals.num_sequences * totals.max_completion_tokens)


def kl_k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Low-variance, non-negative estimate of KL(policy || reference) per token (Schulman 2020, k3)."""
    log_ratio = ref_logprobs - logprobs
    return torch.expm1(log_ratio) - log_ratio


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's pessimistic surrogate per token (arXiv 1707.06347, eq. 7), negated, and where the clip binds."""
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(free, clipped), clipped > free
