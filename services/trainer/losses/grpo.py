"""GRPO (arXiv 2402.03300): PPO's clipped surrogate on group-relative advantages, KL to a reference in the loss."""

import torch

from services.common.config.loss import LossConfig
from services.trainer.losses.terms import Totals, clipped_surrogate, kl_k3, token_weights


def grpo(
    logprobs_N: torch.Tensor,
    entropy_N: torch.Tensor,
    columns: dict[str, torch.Tensor],
    totals: Totals,
    config: LossConfig,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss of N completion tokens and its metrics, all sums to be added over micro-batches and ranks.

    Args:
        logprobs_N: Log-probabilities under the policy being trained; carries the gradient.
        entropy_N: Entropy of the policy at each token, in nats; carries the gradient.
        columns: Per token: advantages, old_logprobs (of the policy before this batch), completion_length and, if
            `config.kl_coef` is set, ref_logprobs.
        totals: Counts over the whole mini-batch.
        config: Clip range and coefficients.
    """
    weights_N = token_weights(config, totals, columns["completion_length"])
    ratio_N = torch.exp(logprobs_N - columns["old_logprobs"])
    surrogate_N, clipped_N = clipped_surrogate(ratio_N, columns["advantages"], config.clip_low, config.clip_high)
    policy_loss = (weights_N * surrogate_N).sum()
    entropy = (weights_N * entropy_N).sum()
    loss = policy_loss - config.entropy_coef * entropy
    metrics = {
        "policy_loss": policy_loss,
        "entropy": entropy_N.sum() / totals.num_tokens,
        "clip_fraction": clipped_N.sum() / totals.num_tokens,
        "ratio_mean": ratio_N.sum() / totals.num_tokens,
    }
    if config.kl_coef:
        kl_N = kl_k3(logprobs_N, columns["ref_logprobs"])
        kl = (weights_N * kl_N).sum()
        loss = loss + config.kl_coef * kl
        metrics["kl"] = kl_N.sum() / totals.num_tokens
    metrics["loss"] = loss
    return loss, {name: value.detach() for name, value in metrics.items()}
