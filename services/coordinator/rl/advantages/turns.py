"""Computes one advantage for each turn of a conversation."""

import numpy as np

from services.common.config.advantage import AdvantageConfig
from services.coordinator.rl.advantages.group import centered
from services.coordinator.rl.advantages.samples import Samples


def per_turn(samples: Samples, config: AdvantageConfig) -> np.ndarray:
    """Subtracts from each turn's discounted return the mean over all turns of the group; a turn's tokens share it.

    A turn is a run of consecutive trained tokens. The sample's reward r, minus its KL penalties, is given at its last
    turn, so turn k of K (from 0) has the return gamma^(K - 1 - k) * r. Every turn counts once in the mean, whatever
    its length; a sample without a trained token counts as one turn. With one turn per sample this equals dr_grpo.
    """
    starts_M = np.ones(len(samples.sample_M), bool)
    starts_M[1:] = (np.diff(samples.position_M) > 1) | (np.diff(samples.sample_M) > 0)
    sample_K = samples.sample_M[starts_M]  # the sample of each of the batch's K turns
    turns_S = np.bincount(sample_K, minlength=len(samples.count_S))
    later_K = np.cumsum(turns_S)[sample_K] - 1 - np.arange(len(sample_K))
    sample_K = np.append(sample_K, np.flatnonzero(turns_S == 0))
    discounts_K = config.gamma ** np.append(later_K, np.zeros(np.count_nonzero(turns_S == 0)))
    returns_K = discounts_K * samples.net_rewards_S[sample_K]
    return centered(returns_K, samples.group_S[sample_K])[np.cumsum(starts_M) - 1]
