"""Advantages of mean 0 and deviation 1."""

import numpy as np

from services.common.config.advantage import AdvantageConfig
from services.coordinator.rl.advantages.samples import Samples


def whiten(advantages_M: np.ndarray, samples: Samples, config: AdvantageConfig) -> np.ndarray:
    """(a - mean) / (std + eps) over the trained tokens of the batch or of each group, with the population's std.

    Tokens count, not samples: a long sample weighs as much as it does in a loss that is a mean over tokens.
    """
    if config.whitening == "none" or not advantages_M.size:
        return advantages_M
    if config.whitening == "batch":
        return (advantages_M - advantages_M.mean()) / (advantages_M.std() + config.eps)
    group_M = samples.group_S[samples.sample_M]
    count = np.maximum(np.bincount(group_M), 1)  # 0 where all of a group is masked
    centered_M = advantages_M - (np.bincount(group_M, advantages_M) / count)[group_M]
    std = np.sqrt(np.bincount(group_M, centered_M**2) / count)
    return centered_M / (std + config.eps)[group_M]
