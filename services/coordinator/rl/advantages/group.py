"""Implements advantages that compare a sample with the others of its prompt; all its tokens get the same advantage.

r is the sample's reward minus the KL penalties of its tokens, if there is a KL penalty. In a group whose r are all
equal, every advantage is exactly 0.
"""

import numpy as np

from services.common.config.advantage import AdvantageConfig
from services.common.rewards import is_constant
from services.coordinator.rl.advantages.samples import Samples


def centered(numbers: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Subtracts the mean of each group (0, 1, ...); exactly 0 if all numbers of a group are equal up to rounding."""
    first = np.zeros(groups.max(initial=-1) + 1)
    first[groups] = numbers  # one number of each group: large numbers lose no digits in the mean of the differences
    relative = numbers - first[groups]
    relative[is_constant(numbers, groups)[groups]] = 0.0
    return relative - _mean(relative, groups, np.ones(len(groups)))


def centered_rewards(samples: Samples, config: AdvantageConfig) -> np.ndarray:
    """Returns r - mean. Dividing by the std would favor too easy and too hard prompts (arXiv 2503.20783)."""
    return centered(samples.net_rewards_S, samples.group_S)[samples.sample_M]


def grpo(samples: Samples, config: AdvantageConfig) -> np.ndarray:
    """Returns (r - mean) / (std + eps), with the sample standard deviation (arXiv 2402.03300, section 4.1.2)."""
    centered_S = centered(samples.net_rewards_S, samples.group_S)
    if config.normalize_std:
        size = np.bincount(samples.group_S)
        std = np.sqrt(np.bincount(samples.group_S, centered_S**2) / (size - 1))
        centered_S /= (std + config.eps)[samples.group_S]
    return centered_S[samples.sample_M]


def rloo(samples: Samples, config: AdvantageConfig) -> np.ndarray:
    """Returns r - mean of the others, which is n / (n - 1) * (r - mean of all n) (arXiv 2402.14740, section 2.2)."""
    size_S = np.bincount(samples.group_S)[samples.group_S]
    centered_S = centered(samples.net_rewards_S, samples.group_S)
    return (centered_S * size_S / (size_S - 1))[samples.sample_M]


def opo(samples: Samples, config: AdvantageConfig) -> np.ndarray:
    """Returns r - mean weighted by trained tokens, the baseline of least variance (arXiv 2505.23585)."""
    centered_S = centered(samples.net_rewards_S, samples.group_S)
    return (centered_S - _mean(centered_S, samples.group_S, samples.count_S))[samples.sample_M]


def gpg(samples: Samples, config: AdvantageConfig) -> np.ndarray:
    """Returns (r - mean) * samples / samples in groups of differing rewards; others get 0 (arXiv 2504.02546)."""
    centered_S = centered(samples.net_rewards_S, samples.group_S)
    mixed = np.bincount(samples.group_S, centered_S != 0) > 0
    num_mixed = np.count_nonzero(mixed[samples.group_S])
    return (centered_S * (len(centered_S) / max(num_mixed, 1)))[samples.sample_M]


def _mean(numbers: np.ndarray, groups: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns the weighted mean of each number's group; 0 if all weights are 0."""
    total = np.bincount(groups, weights)
    return (np.bincount(groups, weights * numbers) / np.where(total > 0, total, 1))[groups]
