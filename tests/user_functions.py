"""Defines a loss and an advantage estimator as a user writes them."""

import itertools

import numpy as np
import torch

from services.common.config.advantage import AdvantageConfig
from services.common.config.loss import LossConfig
from services.coordinator.rl.advantages.samples import Samples
from services.trainer.losses.kinds import Tokens

NOT_A_FUNCTION = 3


def soft_clip(tokens: Tokens, config: LossConfig, *, temperature: float = 1.0):
    """Returns the loss of REINFORCE with a weight that falls off smoothly as the policy moves away, and that weight.

    Where all tokens of a micro-batch have large advantages, it returns no share of others.
    """
    ratio_N = tokens.log_ratio_N.exp()
    weight_N = torch.exp(-temperature * tokens.log_ratio_N.detach().abs())
    metrics = {"weight_mean": weight_N}
    if (small_N := tokens.advantages_N.abs() < 1).any():
        metrics = {"small_share": small_N.float(), **metrics}
    return -tokens.advantages_N * ratio_N * weight_N, metrics


def spoiled(tokens: Tokens, config: LossConfig):
    """Returns the loss of REINFORCE, but NaN where an advantage is above 1000."""
    factor_N = torch.where(tokens.advantages_N > 1000, torch.nan, 1.0)
    return -tokens.advantages_N * tokens.log_ratio_N.exp() * factor_N, {}


def misshapen(tokens: Tokens, config: LossConfig):
    return tokens.logprobs_N[:1], {}


def detached(tokens: Tokens, config: LossConfig):
    return -tokens.advantages_N * tokens.log_ratio_N.detach().exp(), {}


def divides(tokens: Tokens, config: LossConfig):
    """The sign of the advantage, which is NaN where it is 0."""
    return -tokens.advantages_N / tokens.advantages_N.abs() * tokens.log_ratio_N.exp(), {}


def only_loss(tokens: Tokens, config: LossConfig):
    return -tokens.advantages_N * tokens.logprobs_N


def number(tokens: Tokens, config: LossConfig):
    return -tokens.advantages_N * tokens.logprobs_N, {"half": 0.5}


def raises(tokens: object, config: object):
    raise KeyError("column")


_calls = itertools.count()


def fails_once(tokens: Tokens, config: LossConfig):
    """Returns the loss of REINFORCE, but fails for the second micro-batch that this process computes."""
    if next(_calls) == 1:
        raise KeyError("column")
    return -tokens.advantages_N * tokens.logprobs_N, {}


def names(tokens: Tokens, config: LossConfig, *, metric: str):
    """Returns the loss of REINFORCE, and a metric of this name."""
    return -tokens.advantages_N * tokens.logprobs_N, {metric: torch.ones_like(tokens.logprobs_N)}


def ranks(samples: Samples, config: AdvantageConfig, *, scale: float = 1.0) -> np.ndarray:
    """Returns the rank of each token's sample among all samples by reward, from -scale / 2 to scale / 2."""
    order_S = samples.rewards_S.argsort().argsort()
    return (scale * (order_S / max(1, len(order_S) - 1) - 0.5))[samples.sample_M]


def not_finite(samples: Samples, config: AdvantageConfig) -> np.ndarray:
    return np.full(len(samples.sample_M), np.nan)
