"""Computes one advantage for each turn of an episode."""

import numpy as np

from services.common.config.advantage import AdvantageConfig
from services.coordinator.rl.advantages.group import centered
from services.coordinator.rl.advantages.samples import Samples


def per_turn(samples: Samples, config: AdvantageConfig) -> np.ndarray:
    """Subtracts from each turn's discounted return the mean over all turns of the group; a turn's tokens share it.

    Turn k of K (from 0) has the return sum over j >= k of gamma^(j - k) * r_j. r_j is the environment's reward for
    turn j; the rest of the sample's reward, minus its KL penalties, is added to the last turn's. Every turn counts once
    in the mean, whatever its length; a sample without a trained token counts as one turn. With one turn per sample
    this equals dr_grpo. There is one mean for a group and not one for each turn index, because the policy decides how
    many turns there are: then each further turn would cost the mean reward of that index
    (github.com/verl-project/verl/issues/7244).
    """
    starts_M = samples.turn_starts_M
    sample_K = samples.sample_M[starts_M]  # the sample of each of the batch's K turns
    rewards_K = samples.turn_rewards_K.copy()
    of_turns_S = np.bincount(sample_K, rewards_K, minlength=len(samples.rewards_S))
    rest_S = samples.net_rewards_S - of_turns_S
    is_last_K = np.append(np.diff(sample_K) > 0, True)[: len(sample_K)]
    rewards_K[is_last_K] += rest_S[sample_K[is_last_K]]
    for k in range(len(rewards_K) - 2, -1, -1):
        if not is_last_K[k]:
            rewards_K[k] += config.gamma * rewards_K[k + 1]
    untrained = np.flatnonzero(~samples.trained_S)
    returns_K = np.append(rewards_K, samples.net_rewards_S[untrained])
    groups_K = samples.group_S[np.append(sample_K, untrained)]
    return centered(returns_K, groups_K)[np.cumsum(starts_M) - 1]
