"""Implements CISPO (MiniMax-M1, arXiv 2506.13585): REINFORCE with a clipped importance weight.

Unlike PPO's clip, which removes the gradient of a clipped token, this keeps a gradient for every token.
"""

import torch

from services.common.config.trainer.loss import LossConfig
from services.trainer.losses.terms import Tokens


def cispo(tokens: Tokens, config: LossConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns each token's loss -sg[clip(r, min_ratio, max_ratio)] A log policy, and as a metric where r is clipped.

    r = policy / old, A is the advantage, and sg stops the gradient.
    """
    ratio_N = tokens.log_ratio_N.detach().exp()
    weights_N = ratio_N.clamp(config.cispo.min_ratio, config.cispo.max_ratio)
    return -weights_N * tokens.advantages_N * tokens.logprobs_N, {"clip_fraction": weights_N != ratio_N}
