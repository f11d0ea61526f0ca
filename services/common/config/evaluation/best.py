"""Defines the held-out metric by which the best policy is chosen, and when a run ends because it no longer improves."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from services.common.config.base import Strict
from services.common.rewards import is_above


class BestConfig(Strict):
    """Names a held-out metric; a text alone is the metric."""

    metric: str = Field(pattern="^eval/[^/]+/.+$")
    """Name of the metric, such as eval/test/reward; `test` is a name in data.eval."""
    mode: Literal["max", "min"] = "max"
    """Whether the largest or the smallest value is best. Set min for a loss, such as eval/test/nll of a supervised
    run."""

    @model_validator(mode="before")
    @classmethod
    def _metric_alone(cls, value: object) -> object:
        return {"metric": value} if isinstance(value, str) else value

    @property
    def set_name(self) -> str:
        """Returns the name in data.eval."""
        return self.metric.split("/")[1]

    def is_better(self, value: float, than: float, by: float = 0.0) -> bool:
        """Returns whether `value` is better than another by more than `by`. NaN never is."""
        return is_above(value, than, by) if self.mode == "max" else is_above(-value, -than, by)


class EarlyStoppingConfig(BestConfig):
    """Ends a run when its held-out metric stops improving."""

    patience: int = Field(default=3, ge=1)
    """The run ends after this many evaluations in a row without a better value."""
    min_delta: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """A value counts as better only if it differs from the best one by more than this."""


class EvaluationFrequency(Strict):
    """Says when held-out sets are evaluated, and when that ends the run."""

    eval_freq: int = Field(default=0, ge=0)
    """Evaluate every this many steps, and after the last step; 0 turns this off."""
    eval_before_train: bool = True
    """Evaluate the starting weights before the first step, if data.eval names a file."""
    early_stopping: EarlyStoppingConfig | None = None
    """End the run, as if num_steps were reached, when this held-out metric stops improving; null trains all steps."""


def check_best(
    keep_best: BestConfig | None, evaluation: EvaluationFrequency, held_out: Mapping[str, Path], *, save_freq: int
) -> None:
    """Checks the rules that involve several sections.

    Raises:
        ValueError: A metric names a set that is not in data.eval, nothing is evaluated, or an evaluated step is not
            saved.
    """
    eval_freq = evaluation.eval_freq
    named = {"checkpoint.keep_best": keep_best, "evaluation.early_stopping": evaluation.early_stopping}
    for key, config in named.items():
        if config is None:
            continue
        if config.set_name not in held_out:
            has = ", ".join(held_out) or "no set"
            raise ValueError(f"{key}.metric {config.metric}: data.eval has no {config.set_name}, only {has}")
        if not eval_freq:
            raise ValueError(f"{key} is set but evaluation.eval_freq is 0: set how often to evaluate")
    if keep_best and (not save_freq or eval_freq % save_freq):
        raise ValueError(
            f"checkpoint.keep_best needs a checkpoint of every evaluated step: evaluation.eval_freq {eval_freq} must "
            f"be a multiple of checkpoint.save_freq {save_freq}, which must be above 0"
        )
