"""Computes advantages from rewards with pure functions, chosen by `advantage.kind`.

An estimator maps Samples to one float64 advantage per trained token [M]. Every sample of a batch counts in baselines,
even if loss_mask excludes all its tokens: the mask removes the sample's gradient, but its reward still tells how hard
the prompt is (overlong filtering, arXiv 2503.14476).
"""

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from services.common.config.advantage import AdvantageConfig
from services.coordinator.rl.advantages import estimators
from services.coordinator.rl.advantages.samples import Samples

Estimator = Callable[[Samples, AdvantageConfig], np.ndarray]

ESTIMATORS: dict[str, Estimator] = {
    "grpo": estimators.grpo,
    "dr_grpo": estimators.centered_rewards,
    "gdpo": estimators.gdpo,
    "max_rl": estimators.max_rl,
    "rloo": estimators.rloo,
    "opo": estimators.opo,
    "gpg": estimators.gpg,
    "per_turn": estimators.per_turn,
    "reinforce_plus_plus": estimators.reinforce_plus_plus,
    "reinforce_plus_plus_baseline": estimators.centered_rewards,  # and whitening over the batch
    "remax": estimators.remax,
    "gae": estimators.gae,
    "distill": estimators.distill,
    "python": estimators.python,
}


def compute_advantages(batch: pa.Table, config: AdvantageConfig, *, kl_coef: float | None = None) -> pa.Table:
    """Returns `batch` (SAMPLE_SCHEMA) with `advantages` and, with a critic, `returns`, one per token.

    Both are 0 where loss_mask is false. The returns, the critic's targets, are advantages before whitening + values.
    `kl_coef` is this step's coefficient if it is adaptive (samples.coef_after); None means `config.kl.coef`.

    Raises:
        InvalidInput: A column that the kind needs is missing or differs in length from tokens, or the kind compares
            the samples of a group and a group has only one; `field` names the column.
    """
    samples = Samples.of(batch, config, config.kl.coef if kl_coef is None else kl_coef)
    advantages_M = ESTIMATORS[config.kind](samples, config)
    if samples.values_M is not None:
        batch = _with_column(batch, "returns", samples.to_lists(advantages_M + samples.values_M))
    advantages_M = estimators.whiten(advantages_M, samples, config)
    if samples.teacher_kl_M is not None:
        # On samples of the policy, this is the gradient of KL(policy || teacher) of the next token in every state that
        # was visited. What a token does to later states is left out, a discount of 0 (arXiv 2306.13649, section 3).
        advantages_M = advantages_M - config.teacher_coef * samples.teacher_kl_M
    return _with_column(batch, "advantages", samples.to_lists(advantages_M))


def _with_column(batch: pa.Table, name: str, column: pa.Array) -> pa.Table:
    index = batch.schema.get_field_index(name)
    return batch.set_column(index, batch.schema.field(index), column)


__all__ = ["ESTIMATORS", "compute_advantages"]
