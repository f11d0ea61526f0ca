"""Implements REINFORCE (Williams 1992)."""

import torch

from services.common.config.trainer.loss import LossConfig
from services.trainer.losses.terms import Tokens


def reinforce(tokens: Tokens, config: LossConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns each token's loss -A log policy."""
    return -tokens.advantages_N * tokens.logprobs_N, {}
