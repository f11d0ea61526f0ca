"""Supervised fine-tuning: the negative log-likelihood."""

import torch

from services.common.config.trainer.loss import LossConfig
from services.trainer.losses.terms import Tokens


def sft(tokens: Tokens, config: LossConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss -log policy of each token; advantages are not read."""
    return -tokens.logprobs_N, {}
