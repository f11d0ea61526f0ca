"""The adaptive coefficient of the KL penalty in the reward, from one step to the next."""

from collections.abc import Mapping

import pyarrow as pa

from services.common.config.advantage import KlConfig
from services.coordinator.rl.advantages.samples import kl_of

_MAX_ERROR = 0.2


def next_coef(coef: float, measured_kl: float, num_samples: int, config: KlConfig) -> float:
    """The coefficient of the step after one that had `coef` and measured `measured_kl` nats per sample.

    coef * (1 + clip(measured / target - 1, -0.2, 0.2) * num_samples / horizon), arXiv 1909.08593, section 2.2. A
    function of recorded numbers alone, so a resumed run goes on with the same coefficient.
    """
    if config.target is None:
        return coef
    error = min(max(measured_kl / config.target - 1, -_MAX_ERROR), _MAX_ERROR)
    return coef * (1 + error * min(num_samples / config.horizon, 1.0))  # a batch above the horizon cannot turn the sign


def coef_after(before: Mapping[str, float] | None, config: KlConfig) -> float:
    """A step's coefficient from `kl_record` of the step before, None for the first: then it is the configured one."""
    if before is None or config.target is None:
        return config.coef
    return next_coef(before["kl_coef"], before["kl_per_sample"], int(before["num_samples"]), config)


def kl_record(batch: pa.Table, coef: float, config: KlConfig) -> dict[str, float]:
    """What `coef_after` needs of a step: its coefficient, mean KL of its samples in nats, and how many they are.

    Raises:
        InvalidInput: ref_logprobs are missing.
    """
    kl = kl_of(batch, config.kind).sum() / batch.num_rows
    return {"kl_coef": coef, "kl_per_sample": float(kl), "num_samples": float(batch.num_rows)}
