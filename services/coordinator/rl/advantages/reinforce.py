"""Implements REINFORCE on each token's return. Compares no samples within a group, so one per prompt is enough."""

import numpy as np

from services.common.config.advantage import AdvantageConfig
from services.coordinator.rl.advantages.samples import Samples
from services.coordinator.rl.advantages.scan import discounted_sums


def reinforce_plus_plus(samples: Samples, config: AdvantageConfig) -> np.ndarray:
    """Sums the discounted token rewards from t on (arXiv 2501.03262); whitened over the batch by default.

    The reward of a turn is at its last token, so no token gets the rewards of turns before its own.
    """
    return discounted_sums(samples.token_rewards_M, samples.count_S, config.gamma)


def remax(samples: Samples, config: AdvantageConfig) -> np.ndarray:
    """Returns the reward minus the KL penalties from t on, minus the greedy completion's reward (arXiv 2310.10505).

    Both rewards are of the whole sample: later turns alone cannot be compared with all turns of the greedy completion.
    """
    assert samples.baseline_S is not None, "kind remax needs baselines"
    penalties_M = discounted_sums(samples.penalty_M, samples.count_S, 1.0)
    return (samples.rewards_S - samples.baseline_S)[samples.sample_M] - penalties_M
