"""Implements PPO's clipped surrogate (arXiv 1707.06347), which GRPO (arXiv 2402.03300) also uses, and the dual clip."""

import torch

from services.common.config.trainer.loss import LossConfig
from services.trainer.losses.terms import Tokens, clipped_surrogate


def grpo(tokens: Tokens, config: LossConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns each token's loss max(-A r, -A clip(r)), r = policy / old, and as metrics where each clip binds.

    If `clip_dual` is c, the loss is at most -A c where A < 0 (arXiv 1912.09729). Without this bound, a single token
    with a negative advantage that has become far more likely could dominate the update.
    """
    ratio_N = tokens.log_ratio_N.exp()
    losses_N, clipped_N = clipped_surrogate(ratio_N, tokens.advantages_N, config.clip_low, config.clip_high)
    if config.clip_dual is None:
        return losses_N, {"clip_fraction": clipped_N}
    bound_N = -tokens.advantages_N * config.clip_dual
    binds_N = (tokens.advantages_N < 0) & (losses_N > bound_N)
    metrics = {"clip_fraction": clipped_N, "clip_dual_fraction": binds_N}
    return torch.where(binds_N, bound_N, losses_N), metrics
