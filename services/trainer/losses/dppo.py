"""Implements DPPO (arXiv 2602.04879), whose trust region bounds each token's divergence instead of its ratio."""

import torch

from services.common.config.trainer.loss import LossConfig
from services.trainer.losses.terms import Tokens


def dppo(tokens: Tokens, config: LossConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns each token's loss -A min(r, max_ratio), r = policy / old, and as a metric where it is masked to 0.

    The gradient is that of REINFORCE weighted by min(r, max_ratio).

    A token is masked, and counted as clipped, if the policy has already moved in the direction of its advantage
    (A > 0 and r > 1, or A < 0 and r < 1) and the divergence between the old and the current policy is above the
    threshold. The divergence is between distributions of two events: the sampled token, of probability p, and all
    other tokens. tv is |p_old - p|; kl is p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)). Under this
    rule a rare token may multiply its probability, but a frequent one may not halve it.

    In the paper the old policy is the engine's, so set old_logprobs: engine.
    """
    policy_N, old_N = tokens.logprobs_N.detach(), tokens.columns["old_logprobs"]
    divergence_N = _DIVERGENCES[config.dppo.divergence](old_N, policy_N)
    is_onward_N = tokens.advantages_N * (policy_N - old_N) > 0
    masked_N = is_onward_N & (divergence_N > config.dppo.threshold)
    weights_N = (policy_N - old_N).exp().clamp(max=config.dppo.max_ratio)
    losses_N = -tokens.advantages_N * weights_N * (tokens.logprobs_N - policy_N).exp()
    return torch.where(masked_N, 0, losses_N), {"clip_fraction": masked_N}


def _total_variation(old_N: torch.Tensor, policy_N: torch.Tensor) -> torch.Tensor:
    return (old_N.exp() - policy_N.exp()).abs()


def _kl(old_N: torch.Tensor, policy_N: torch.Tensor) -> torch.Tensor:
    old_rest_N, policy_rest_N = _log_rest(old_N), _log_rest(policy_N)
    return old_N.exp() * (old_N - policy_N) + old_rest_N.exp() * (old_rest_N - policy_rest_N)


def _log_rest(logprobs_N: torch.Tensor) -> torch.Tensor:
    """Returns log(1 - p), which stays finite even if p rounds to 1."""
    return torch.log(-torch.expm1(logprobs_N.clamp(max=-torch.finfo(logprobs_N.dtype).eps)))


_DIVERGENCES = {"tv": _total_variation, "kl": _kl}
