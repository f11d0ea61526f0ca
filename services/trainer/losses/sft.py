"""Implements the loss of supervised fine-tuning, the negative log-likelihood."""

import torch

from services.common.config.trainer.loss import LossConfig
from services.trainer.losses.terms import Tokens


def sft(tokens: Tokens, config: LossConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns each token's loss -log policy. Does not read advantages."""
    return -tokens.logprobs_N, {}
