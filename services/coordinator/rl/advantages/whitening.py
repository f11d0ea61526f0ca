"""Whitens advantages to mean 0 and standard deviation 1."""

import numpy as np

from services.common.config.advantage import AdvantageConfig
from services.coordinator.rl.advantages.group import centered
from services.coordinator.rl.advantages.samples import Samples


def whiten(advantages_M: np.ndarray, samples: Samples, config: AdvantageConfig) -> np.ndarray:
    """Returns (a - mean) / (std + eps) over the trained tokens of the batch or of each group, with the population std.

    Statistics are per token, not per sample: a long sample weighs as much as in a loss that is a mean over tokens.
    Advantages that are all equal up to rounding become exactly 0.
    """
    if config.whitening == "none" or not advantages_M.size:
        return advantages_M
    group_M = samples.group_S[samples.sample_M]
    if config.whitening == "batch":
        group_M = np.zeros_like(group_M)
    count = np.maximum(np.bincount(group_M), 1)  # the count is 0 if all tokens of a group are masked
    centered_M = centered(advantages_M, group_M)
    std = np.sqrt(np.bincount(group_M, centered_M**2) / count)
    return centered_M / (std + config.eps)[group_M]
