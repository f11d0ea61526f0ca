"""SAPO (arXiv 2511.20347): a soft gate around ratio 1 in place of a clip."""

import torch

from services.common.config.trainer.loss import LossConfig
from services.trainer.losses.terms import Tokens


def sapo(tokens: Tokens, config: LossConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss -A (4 / tau) sigmoid(tau (r - 1)) of each token, r = policy / old, tau by the sign of A.

    Its gradient is that of -A r times 4 g (1 - g), g the sigmoid: 1 at r = 1, less on either side; sapo_gate is that.
    The paper's mean is aggregation seq_mean_token_mean.
    """
    is_positive_N = tokens.advantages_N > 0
    tau_N = torch.full_like(tokens.advantages_N, config.sapo.tau_negative)
    tau_N = tau_N.masked_fill(is_positive_N, config.sapo.tau_positive)
    gate_N = torch.sigmoid(tau_N * (tokens.log_ratio_N.exp() - 1))
    return -tokens.advantages_N * 4 / tau_N * gate_N, {"sapo_gate": 4 * gate_N * (1 - gate_N)}
