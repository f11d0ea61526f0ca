"""Adapts the coefficient of the KL penalty in the reward from step to step."""

from collections.abc import Mapping

import pyarrow as pa

from services.common.config.advantage import KlConfig
from services.coordinator.rl.advantages.samples import kl_of

_MAX_ERROR = 0.2


def next_coef(coef: float, measured_kl: float, num_samples: int, config: KlConfig) -> float:
    """Returns the coefficient of the next step, after one with `coef` and a measured KL in nats per sample.

    It is coef * (1 + clip(measured / target - 1, -0.2, 0.2) * num_samples / horizon), arXiv 1909.08593, section 2.2.
    It depends only on recorded numbers, so a resumed run continues with the same coefficient.
    """
    if config.target is None:
        return coef
    error = min(max(measured_kl / config.target - 1, -_MAX_ERROR), _MAX_ERROR)
    return coef * (
        1 + error * min(num_samples / config.horizon, 1.0)
    )  # min(): a batch larger than the horizon cannot change the sign


def coef_after(before: Mapping[str, float] | None, config: KlConfig) -> float:
    """Returns a step's coefficient from the previous step's `kl_record`; the configured one if that is None."""
    if before is None or config.target is None:
        return config.coef
    return next_coef(before["kl_coef"], before["kl_per_sample"], int(before["num_samples"]), config)


def kl_record(batch: pa.Table, coef: float, config: KlConfig) -> dict[str, float]:
    """Returns the numbers that `coef_after` needs: the coefficient, the mean KL per sample in nats, and the number of
    samples.

    Raises:
        InvalidInput: ref_logprobs are missing.
    """
    kl = kl_of(batch, config.kind).sum() / batch.num_rows
    return {"kl_coef": coef, "kl_per_sample": float(kl), "num_samples": float(batch.num_rows)}
