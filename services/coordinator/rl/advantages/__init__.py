"""Computes advantages from rewards with pure functions, chosen by `advantage.kind`.

An estimator maps Samples to one float64 advantage per trained token [M]. Every sample of a batch counts in baselines,
even if loss_mask excludes all its tokens: the mask removes the sample's gradient, but its reward still tells how hard
the prompt is (overlong filtering, arXiv 2503.14476).
"""

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from services.common.config.advantage import AdvantageConfig
from services.coordinator.rl.advantages.estimators import (
    centered_rewards,
    gae,
    gpg,
    grpo,
    opo,
    per_turn,
    python,
    reinforce_plus_plus,
    remax,
    rloo,
    whiten,
)
from services.coordinator.rl.advantages.samples import Samples

Estimator = Callable[[Samples, AdvantageConfig], np.ndarray]

ESTIMATORS: dict[str, Estimator] = {
    "grpo": grpo,
    "dr_grpo": centered_rewards,
    "rloo": rloo,
    "opo": opo,
    "gpg": gpg,
    "per_turn": per_turn,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": centered_rewards,  # and whitening over the batch
    "remax": remax,
    "gae": gae,
    "python": python,
}


def compute_advantages(batch: pa.Table, config: AdvantageConfig, *, kl_coef: float | None = None) -> pa.Table:
    """Returns `batch` (SAMPLE_SCHEMA) with `advantages` and, with a critic, `returns`, one per token.

    Both are 0 where loss_mask is false. The returns, the critic's targets, are advantages before whitening + values.

    Args:
        batch: Rewards and the columns that the kind needs: values, baseline, ref_logprobs.
        config: Kind and settings.
        kl_coef: This step's coefficient if it is adaptive (controller.coef_after); None means `config.kl.coef`.

    Raises:
        InvalidInput: A column that the kind needs is missing or differs in length from tokens, or the kind compares
            the samples of a group and a group has only one; `field` names the column.
    """
    samples = Samples.of(batch, config, config.kl.coef if kl_coef is None else kl_coef)
    advantages_M = ESTIMATORS[config.kind](samples, config)
    if samples.values_M is not None:
        batch = _with_column(batch, "returns", samples.to_lists(advantages_M + samples.values_M))
    return _with_column(batch, "advantages", samples.to_lists(whiten(advantages_M, samples, config)))


def _with_column(batch: pa.Table, name: str, column: pa.Array) -> pa.Table:
    index = batch.schema.get_field_index(name)
    return batch.set_column(index, batch.schema.field(index), column)


__all__ = ["ESTIMATORS", "compute_advantages"]
