"""Implements Clip-Cov and KL-Cov (arXiv 2505.22617), which restrain the few tokens that make the entropy collapse.

These tokens have a large covariance (log-probability - mean) * (advantage - mean); the means are over the mini-batch.

Two things differ from the paper. It uses the policy's log-probabilities; this module uses the engine's, which are known
before the first micro-batch. It selects a share of the tokens, the largest or a random draw from a range; this module
selects by a threshold, so the result depends neither on the split of the mini-batch nor on chance. The metric
covariance_fraction is the share of tokens that the threshold selects.

To choose a threshold: in the paper, where advantages are normalized by their standard deviation, the mean covariance is
3.1 over the largest 0.2 % of tokens and 5.7 over the largest 0.02 %.
"""

from collections.abc import Sequence

import torch

from services.common.config.trainer.loss import LossConfig
from services.trainer.losses.grpo import grpo
from services.trainer.losses.terms import Tokens

Columns = dict[str, torch.Tensor]


def covariance_sums(columns: Sequence[Columns]) -> torch.Tensor:
    """Returns the sums, float64 [2], of behavior_logprobs and advantages over this rank's tokens."""
    names = ("behavior_logprobs", "advantages")
    sums = [torch.stack([(c["loss_mask"] * c[name]).sum(dtype=torch.float64) for name in names]) for c in columns]
    return torch.stack(sums).sum(0)


def covariance(columns: Columns, means_2: torch.Tensor) -> torch.Tensor:
    """Returns each token's term of the covariance, [N], given the mini-batch's means of logprobs and advantages."""
    logprob, advantage = means_2.to(columns["advantages"].dtype)
    return (columns["behavior_logprobs"] - logprob) * (columns["advantages"] - advantage)


def clip_cov(tokens: Tokens, config: LossConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the clipped surrogate of each token, and 0 for the selected tokens."""
    losses_N, metrics = grpo(tokens, config)
    selected_N = tokens.columns["covariance"] >= config.clip_cov.min_covariance
    return torch.where(selected_N, 0, losses_N), {**metrics, "covariance_fraction": selected_N}


def kl_cov(tokens: Tokens, config: LossConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns -A r of each token, without a clip, plus coef * |log r| for the selected tokens; r = policy / old.

    In the first update r is 1 and the penalty has no gradient, so this kind needs num_minibatches or num_epochs above
    1.
    """
    log_ratio_N = tokens.log_ratio_N
    selected_N = tokens.columns["covariance"] >= config.kl_cov.min_covariance
    penalty_N = torch.where(selected_N, config.kl_cov.coef * log_ratio_N.abs(), 0)
    return -tokens.advantages_N * log_ratio_N.exp() + penalty_N, {"covariance_fraction": selected_N}
