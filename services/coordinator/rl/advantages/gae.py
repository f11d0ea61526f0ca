"""Implements generalized advantage estimation with a critic (arXiv 1506.02438)."""

import numpy as np

from services.common.config.advantage import AdvantageConfig
from services.coordinator.rl.advantages.samples import Samples
from services.coordinator.rl.advantages.scan import discounted_sums


def gae(samples: Samples, config: AdvantageConfig) -> np.ndarray:
    """Sums r_t + gamma * V_(t+1) - V_t, discounted by gamma * lam, over the trained tokens of each sample.

    V_t is the value of the state before token t. Tokens that are not trained on are skipped, as they are part of the
    next state. The reward of a turn is that of its last token. The value after the last token is 0. For a truncated
    sample with bootstrap_truncated it is the value before the last token, because the critic does not evaluate the
    state after it.
    """
    values_M = samples.values_M
    assert values_M is not None, "kind gae needs values"
    next_M = np.roll(values_M, -1)
    bootstraps = samples.truncated_S[samples.trained_S] & config.bootstrap_truncated
    next_M[samples.last] = np.where(bootstraps, values_M[samples.last], 0.0)
    errors_M = samples.token_rewards_M + config.gamma * next_M - values_M
    return discounted_sums(errors_M, samples.count_S, config.gamma * config.lam)
