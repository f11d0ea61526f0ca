"""Computes one advantage for each turn of an episode."""

import numpy as np

from services.common.config.advantage import AdvantageConfig
from services.coordinator.rl.advantages.group import centered
from services.coordinator.rl.advantages.samples import Samples


def per_turn(samples: Samples, config: AdvantageConfig) -> np.ndarray:
    """Subtracts from each turn's discounted return the mean over the same turn of the group; a turn's tokens share it.

    Turn k of K (from 0) has the return sum over j >= k of gamma^(j - k) * r_j. r_j is the environment's reward for
    turn j; the rest of the sample's reward, minus its KL penalties, is added to the last turn's. A sample without a
    trained token counts as one turn. With one turn per sample this equals dr_grpo.

    Turns are compared at the same index (arXiv 2505.11821), among the samples that have it: what is left to earn
    differs from turn to turn, so that a mean over all turns would favor the first ones of samples that earn the same.
    A turn that no other sample has gets 0. Returns are compared and not the turns' own rewards: a sum of rewards minus
    their means would subtract as many means as the policy takes turns, which favors few turns or many
    (github.com/verl-project/verl/issues/7244). What is subtracted from a return here depends on nothing that the policy
    does from that turn on, apart from the sample's own part of the mean.
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
    first_K = np.flatnonzero(np.diff(sample_K, prepend=-1))  # index among K of each trained sample's first turn
    index_K = np.arange(len(sample_K)) - np.repeat(first_K, np.diff(first_K, append=len(sample_K)))
    index_K = np.append(index_K, np.zeros_like(untrained))
    groups_K = samples.group_S[np.append(sample_K, untrained)]
    return centered(returns_K, groups_K * (index_K.max(initial=0) + 1) + index_K)[np.cumsum(starts_M) - 1]
