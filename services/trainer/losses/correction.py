"""Computes importance weights and masks that correct for differences between the engine's and trainer's probabilities.

Sources:

- Truncated weights: arXiv 1802.01561, and Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy
  RL Training".
- IcePop's token mask: Ring-1T, arXiv 2510.18855.
- Geometric mask and veto: Liu et al. 2025, "When Speed Kills Stability".
"""

import torch

from services.common.config.trainer.loss import CorrectionConfig
from services.trainer.losses.terms import Tokens


def correction(tokens: Tokens, config: CorrectionConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the factor [N] of each token's policy loss, without gradient, and metrics [N].

    With the default config the factor is 1 for every token, and there are no metrics.
    """
    log_ratio_N = tokens.columns["old_logprobs"] - tokens.columns["behavior_logprobs"]
    if config == CorrectionConfig():
        return torch.ones_like(log_ratio_N), {}
    is_kept_N = _is_kept(tokens, log_ratio_N, config)
    weights_N = _weights(tokens, log_ratio_N, config)
    factor_N = weights_N.clamp(max=config.weight_cap) * is_kept_N
    return factor_N, {
        "correction_mean": factor_N,
        "correction_masked": ~is_kept_N,
        "correction_truncated": is_kept_N & (weights_N > config.weight_cap),
    }


def _weights(tokens: Tokens, log_ratio_N: torch.Tensor, config: CorrectionConfig) -> torch.Tensor:
    if config.weight == "none":
        return torch.ones_like(log_ratio_N)
    return torch.exp(log_ratio_N if config.weight == "token" else tokens.sequence_sum(log_ratio_N))


def _is_kept(tokens: Tokens, log_ratio_N: torch.Tensor, config: CorrectionConfig) -> torch.Tensor:
    is_kept_N = torch.ones_like(log_ratio_N, dtype=torch.bool)
    if config.token_mask:
        is_kept_N &= _is_within(log_ratio_N.exp(), config.token_mask)
    if config.geometric_mask:
        is_kept_N &= _is_within(tokens.sequence_mean(log_ratio_N).exp(), config.geometric_mask)
    if config.veto is not None:
        is_kept_N &= tokens.sequence_sum((log_ratio_N.exp() < config.veto).to(log_ratio_N.dtype)) == 0
    return is_kept_N


def _is_within(values_N: torch.Tensor, bounds: tuple[float, float]) -> torch.Tensor:
    return (values_N >= bounds[0]) & (values_N <= bounds[1])
