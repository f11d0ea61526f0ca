"""Which prompts a step tries and which of their groups it trains on."""

import math
from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from services.common.config.base import Strict


class DynamicSamplingConfig(Strict):
    """Dynamic sampling (DAPO, arXiv 2503.14476, eq. 11): groups that cannot teach anything make room for others."""

    enabled: bool = False
    """Drop groups whose samples all have the same reward, and try further prompts in their place."""
    component: str | None = None
    """Compare this component of reward.scorers, such as the correctness beside a length penalty; null is the reward."""
    max_rounds: float = Field(default=10.0, ge=1, allow_inf_nan=False)
    """Most prompts that one step tries, over data.prompts_per_step."""
    on_budget: Literal["train", "fail"] = "train"
    """With fewer useful groups after so many prompts: train on what there is, if it is enough, or end the run."""


class OverSamplingConfig(Strict):
    """More prompts at once than a step needs."""

    factor: float = Field(default=1.0, ge=1, allow_inf_nan=False)
    """Prompts that are tried at once, over data.prompts_per_step."""
    keep: Literal["index", "arrival"] = "index"
    """index: the first useful groups in the order of the prompts, the same batch whatever the timing; arrival: those
    that are done first, which favours short completions and differs from run to run. The rest is aborted."""

    def at_once(self, prompts_per_step: int) -> int:
        """Prompts that a step begins with."""
        return math.ceil(prompts_per_step * self.factor - 1e-9)  # 10 * 1.1 is a little more than 11


class OverlongConfig(Strict):
    """Samples that reached max_tokens; for a softer rule see the scorer `length`."""

    mask_truncated: bool = False
    """Leave them out of the loss (DAPO's overlong filtering); they still count in the statistics of their group."""


class CurriculumConfig(Strict):
    """Prompts by the share of their samples that passed in earlier steps of this run."""

    enabled: bool = False
    """Try prompts with a success rate within low..high first, and those that were never tried."""
    low: float = Field(default=0.1, ge=0, le=1)
    """Below, a prompt is too hard for now."""
    high: float = Field(default=0.9, ge=0, le=1)
    """Above, a prompt is too easy."""
    component: str | None = None
    """Component of reward.scorers that says whether a sample passed; null is the reward."""
    pass_threshold: float = Field(default=1.0, allow_inf_nan=False)
    """A sample passes if its reward, or component, is at least this."""
    window: int | None = Field(default=None, ge=1)
    """Only the last so many steps count, so that prompts are tried again; null is all. Use several epochs."""

    @model_validator(mode="after")
    def _low_is_below_high(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low {self.low:g} must be at most high {self.high:g}")
        return self


class SelectionConfig(Strict):
    """Which prompts a step tries and which of their groups it trains on; by default all of the batch of the step."""

    dynamic: DynamicSamplingConfig = DynamicSamplingConfig()
    """Replace groups without a signal."""
    over_sampling: OverSamplingConfig = OverSamplingConfig()
    """Try more at once."""
    overlong: OverlongConfig = OverlongConfig()
    """Truncated samples."""
    curriculum: CurriculumConfig = CurriculumConfig()
    """Order of prompts."""


def check_selection(selection: SelectionConfig, completions_per_prompt: int, components: Sequence[str]) -> None:
    """The rules between the sections; `components` are the names in reward.scorers.

    Raises:
        ValueError: Samples of a group cannot differ, or a component does not exist.
    """
    if selection.dynamic.enabled and completions_per_prompt < 2:
        raise ValueError(
            "selection.dynamic compares the samples of a prompt with each other: "
            "rollout.completions_per_prompt must be at least 2"
        )
    for key in ("dynamic", "curriculum"):
        component = getattr(selection, key).component
        if component is not None and component not in components:
            raise ValueError(
                f"selection.{key}.component {component} is none of reward.scorers: {', '.join(components)}"
            )
