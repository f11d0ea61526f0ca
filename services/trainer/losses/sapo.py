"""Implements SAPO (arXiv 2511.20347), which replaces the clip by a smooth gate around ratio 1."""

import torch

from services.common.config.trainer.loss import LossConfig
from services.trainer.losses.terms import Tokens


def sapo(tokens: Tokens, config: LossConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns each token's loss -A (4 / tau) sigmoid(tau (r - 1)), r = policy / old; tau depends on the sign of A.

    With g = sigmoid(tau (r - 1)), the gradient is that of -A r times the gate 4 g (1 - g), which is 1 at r = 1 and
    smaller on either side. The metric sapo_gate is this gate. To average as the paper does, set
    aggregation: seq_mean_token_mean.
    """
    is_positive_N = tokens.advantages_N > 0
    tau_N = torch.full_like(tokens.advantages_N, config.sapo.tau_negative)
    tau_N = tau_N.masked_fill(is_positive_N, config.sapo.tau_positive)
    gate_N = torch.sigmoid(tau_N * (tokens.log_ratio_N.exp() - 1))
    return -tokens.advantages_N * 4 / tau_N * gate_N, {"sapo_gate": 4 * gate_N * (1 - gate_N)}
