"""From the rewards of one prompt group to the advantage of each sample."""

import functools
from collections.abc import Callable

import numpy as np

from services.common.config.run import AdvantageConfig

# rewards float64 [n] -> advantages float64 [n]
Estimator = Callable[[np.ndarray], np.ndarray]


def grpo(rewards: np.ndarray, *, eps: float) -> np.ndarray:
    """(r - mean) / (std + eps), with the sample standard deviation (arXiv 2402.03300, section 4.1.2)."""
    centered = rewards - rewards.mean()
    return centered / (rewards.std(ddof=1) + eps)


def dr_grpo(rewards: np.ndarray) -> np.ndarray:
    """r - mean: no division by the deviation, which favours too easy and too hard prompts (arXiv 2503.20783)."""
    return rewards - rewards.mean()


def estimator(config: AdvantageConfig) -> Estimator:
    """The estimator that `config` names."""
    return {"grpo": functools.partial(grpo, eps=config.eps), "dr_grpo": dr_grpo}[config.kind]
