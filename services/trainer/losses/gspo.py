"""GSPO (arXiv 2507.18071): the clipped surrogate of a sequence's ratio, not a token's."""

import torch

from services.common.config.trainer.loss import LossConfig
from services.trainer.losses.terms import Tokens, clipped_surrogate


def gspo(tokens: Tokens, config: LossConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss max(-A s, -A clip(s)) of each token, s = exp(mean of the sequence's log policy / old).

    In the paper's token form (GSPO-token) s is sg[s] * policy / sg[policy]: with one advantage for the whole
    sequence the gradient is that of the sequence form. The paper's mean is aggregation seq_mean_token_mean.
    """
    sequence_N = tokens.sequence_mean(tokens.log_ratio_N)
    ratio_N = torch.exp(sequence_N + (tokens.logprobs_N - tokens.logprobs_N.detach()))
    losses_N, clipped_N = clipped_surrogate(ratio_N, tokens.advantages_N, config.gspo.clip_low, config.gspo.clip_high)
    return losses_N, {"clip_fraction": clipped_N}
