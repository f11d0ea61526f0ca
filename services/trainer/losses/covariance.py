"""Clip-Cov and KL-Cov (arXiv 2505.22617): the few tokens that make entropy collapse are held back.

Those are tokens with a large (log-probability - mean) * (advantage - mean), means over the mini-batch. The paper takes
the policy's log-probabilities and a share of the tokens: the largest, or a random draw from a range. Here they
are the engine's, which are known before the first micro-batch, and the selection is a threshold, so it depends neither
on how the mini-batch is split nor on chance; covariance_fraction says how many it selects. In the paper, with
advantages normalised by their deviation, the largest 0.2 % have a mean of 3.1 and the largest 0.02 % one of 5.7.
"""

from collections.abc import Sequence

import torch

from services.common.config.trainer.loss import LossConfig
from services.trainer.losses.grpo import grpo
from services.trainer.losses.terms import Tokens

Columns = dict[str, torch.Tensor]


def covariance_sums(columns: Sequence[Columns]) -> torch.Tensor:
    """Sums, float64 [2], of the tokens' behaviour_logprobs and advantages, to be added up over ranks."""
    names = ("behaviour_logprobs", "advantages")
    sums = [torch.stack([(c["loss_mask"] * c[name]).sum(dtype=torch.float64) for name in names]) for c in columns]
    return torch.stack(sums).sum(0)


def covariance(columns: Columns, means_2: torch.Tensor) -> torch.Tensor:
    """Each token's share of the covariance, [N], given the mini-batch's means."""
    logprob, advantage = means_2.to(columns["advantages"].dtype)
    return (columns["behaviour_logprobs"] - logprob) * (columns["advantages"] - advantage)


def clip_cov(tokens: Tokens, config: LossConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped surrogate, but 0 for the selected tokens."""
    losses_N, metrics = grpo(tokens, config)
    selected_N = tokens.columns["covariance"] >= config.clip_cov.min_covariance
    return torch.where(selected_N, 0, losses_N), {**metrics, "covariance_fraction": selected_N}


def kl_cov(tokens: Tokens, config: LossConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-A r, r = policy / old, without a clip, and coef * |log r| on top for the selected tokens.

    In the first mini-batch r is 1 and the penalty has no gradient: this kind needs num_minibatches above 1.
    """
    log_ratio_N = tokens.log_ratio_N
    selected_N = tokens.columns["covariance"] >= config.kl_cov.min_covariance
    penalty_N = torch.where(selected_N, config.kl_cov.coef * log_ratio_N.abs(), 0)
    return -tokens.advantages_N * log_ratio_N.exp() + penalty_N, {"covariance_fraction": selected_N}
