"""From the rewards of one prompt group to the advantage of each sample."""

import functools
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from services.common.config.advantage import AdvantageConfig

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


def credit(batch: pa.Table, config: AdvantageConfig) -> pa.Table:
    """`batch` (common.batch.SAMPLE_SCHEMA) with its advantages, one for each completion token."""
    groups, rewards = batch["group"].to_numpy(), batch["reward"].to_numpy()
    advantages = np.empty(batch.num_rows)
    for group in np.unique(groups):
        advantages[groups == group] = estimator(config)(rewards[groups == group])
    lengths = pc.list_value_length(batch["tokens"]).to_numpy()
    rows = np.split(np.repeat(advantages, lengths), np.cumsum(lengths)[:-1])
    index = batch.schema.get_field_index("advantages")
    field = batch.schema.field(index)
    return batch.set_column(index, field, pa.array(rows, field.type))
