"""Warns of steps from which the policy learns little: its entropy collapses, no group is mixed, or groups are dropped.
Comparisons with earlier steps use only their metrics, so a resumed run continues them.
"""

import logging
from collections.abc import Mapping

from services.common.config.observability import WarningsConfig

log = logging.getLogger(__name__)

Metrics = Mapping[str, float]
_PREFIX = "warning/"
_COLLAPSE, _UNMIXED, _DROPPED = (
    f"{_PREFIX}{name}" for name in ("entropy_collapse", "steps_without_mixed_group", "dropped_groups")
)
_FIRST_ENTROPY = f"{_PREFIX}first_entropy"
# Metrics of failures -> what they are in a warning: groups by scorer and reason, and tries of an episode by reason.
_FAILED = {"sampling/failed/": "", "environment/failed_": "environment/"}


def warning_metrics(step: int, metrics: Metrics, before: Metrics, settings: WarningsConfig) -> dict[str, float]:
    """Logs the warnings of `step`, and returns their metrics.

    Args:
        step: Number of the step.
        metrics: Its metrics.
        before: The metrics of the step before it, which this function had added to; empty for the first.
        settings: When to warn.
    """
    return {
        **_entropy(step, metrics, before, settings.entropy_ratio),
        **_mixed(step, metrics, before, settings.steps_without_mixed_group),
        **_dropped(step, metrics, settings.dropped_groups),
    }


def _entropy(step: int, metrics: Metrics, before: Metrics, ratio: float) -> dict[str, float]:
    if "train/entropy" not in metrics:
        return {}
    now, first = metrics["train/entropy"], before.get(_FIRST_ENTROPY, metrics["train/entropy"])
    collapsed = now < ratio * first
    if collapsed and not before.get(_COLLAPSE):
        log.warning(
            "step %d: the entropy collapses: %.3g nats per token, after %.3g in the first step; samples of a prompt "
            "become alike, and rewards stop rising: lower trainer.optim.lr, set trainer.loss.entropy_coef, or raise "
            "the clip range (observability.warnings.entropy_ratio)",
            *(step, now, first),
        )
    return {_FIRST_ENTROPY: first, _COLLAPSE: float(collapsed)}


def _mixed(step: int, metrics: Metrics, before: Metrics, most: int) -> dict[str, float]:
    count = 0.0 if metrics["reward/mixed_groups"] else before.get(_UNMIXED, 0.0) + 1
    if most and count == most:
        log.warning(
            "step %d: no group had different rewards in %d steps (mean reward %.3g), so nothing was learned from "
            "them: use prompts of another difficulty, more samples per prompt, or selection.dynamic "
            "(observability.warnings.steps_without_mixed_group)",
            *(step, most, metrics["reward/mean"]),
        )
    return {_UNMIXED: count}


def _dropped(step: int, metrics: Metrics, most: float) -> dict[str, float]:
    """Warns of groups that have no score, with the scorer or environment that failed most often."""
    dropped = metrics.get("sampling/dropped_no_score", 0.0)
    share = dropped / metrics["sampling/prompts"] if metrics.get("sampling/prompts") else 0.0
    if share > most:
        pairs = [(name, prefix) for name in metrics for prefix in _FAILED if name.startswith(prefix)]
        failed = {_FAILED[prefix] + name.removeprefix(prefix): metrics[name] for name, prefix in pairs}
        often = sorted(failed.items(), key=lambda pair: -pair[1])
        why = ", ".join(f"{name} in {number:g}" for name, number in often)
        log.warning(
            "step %d: %.0f%% of the prompt groups (%g) were dropped because a sample had no score: %s; the log has "
            "each failure (observability.warnings.dropped_groups)",
            *(step, 100 * share, dropped, why),
        )
    return {_DROPPED: share}
