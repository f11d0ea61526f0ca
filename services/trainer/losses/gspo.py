"""Implements GSPO (arXiv 2507.18071), which clips the ratio of a whole sequence instead of each token's."""

import torch

from services.common.config.trainer.loss import LossConfig
from services.trainer.losses.terms import Tokens, clipped_surrogate


def gspo(tokens: Tokens, config: LossConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns each token's loss max(-A s, -A clip(s)), s = exp(mean over the sequence of log(policy / old)).

    This is the paper's token form (GSPO-token), where s is written as sg[s] * policy / sg[policy]. If all tokens of a
    sequence have the same advantage, its gradient is that of the sequence form. To average as the paper does, set
    aggregation: seq_mean_token_mean.
    """
    sequence_N = tokens.sequence_mean(tokens.log_ratio_N)
    ratio_N = torch.exp(sequence_N + (tokens.logprobs_N - tokens.logprobs_N.detach()))
    losses_N, clipped_N = clipped_surrogate(ratio_N, tokens.advantages_N, config.gspo.clip_low, config.gspo.clip_high)
    return losses_N, {"clip_fraction": clipped_N}
