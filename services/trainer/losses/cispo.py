"""CISPO (MiniMax-M1, arXiv 2506.13585): REINFORCE under a truncated importance weight. No token loses its gradient."""

import torch

from services.common.config.trainer.loss import LossConfig
from services.trainer.losses.terms import Tokens


def cispo(tokens: Tokens, config: LossConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss -sg[clip(r, min_ratio, max_ratio)] A log policy of each token, r = policy / old; and where r is clipped."""
    ratio_N = tokens.log_ratio_N.detach().exp()
    weights_N = ratio_N.clamp(config.cispo.min_ratio, config.cispo.max_ratio)
    return -weights_N * tokens.advantages_N * tokens.logprobs_N, {"clip_fraction": weights_N != ratio_N}
