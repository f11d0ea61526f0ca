"""Defines the config section `selection`: the prompts that a step tries and the groups that it trains on."""

import math
from typing import Literal

from pydantic import Field

from services.common.config.base import Strict


class DynamicSamplingConfig(Strict):
    """Replaces groups whose advantages are all zero: dynamic sampling (DAPO, arXiv 2503.14476, eq. 11)."""

    enabled: bool = False
    """Drop groups whose samples all have the same reward, and try further prompts in their place (verl
    filter_groups)."""
    component: str | None = None
    """Component of reward.scorers to compare instead of the reward, such as correctness if there is a length penalty
    too; null compares the reward."""
    max_rounds: float = Field(default=10.0, ge=1, allow_inf_nan=False)
    """Limit on the prompts that one step tries, as a multiple of data.prompts_per_step."""
    on_budget: Literal["train", "fail"] = "train"
    """What to do if a step reaches max_rounds with too few groups: train on the groups that it has (fails if they are
    too few for the mini-batches and ranks), or fail the run."""


class OverSamplingConfig(Strict):
    """Tries more prompts concurrently than a step needs."""

    factor: float = Field(default=1.0, ge=1, allow_inf_nan=False)
    """Number of prompts to try concurrently, as a multiple of data.prompts_per_step."""
    keep: Literal["index", "arrival"] = "index"
    """Which usable groups to keep. index: the first ones in prompt order, so that the batch does not depend on timing;
    arrival: the first ones to finish, which favors short completions and differs from run to run. All others are
    aborted."""

    def at_once(self, prompts_per_step: int) -> int:
        """Returns the number of prompts that a step starts with."""
        return math.ceil(prompts_per_step * self.factor - 1e-9)  # 10 * 1.1 is a little more than 11


class OverlongConfig(Strict):
    """What to do with samples that reached max_tokens; the scorer `length` is a gentler alternative."""

    mask_truncated: bool = False
    """Leave samples truncated at max_tokens out of the loss (DAPO's overlong filtering). They still count in their
    group's mean and standard deviation."""


class CurriculumConfig(Strict):
    """Orders prompts by their success rate: the share of their samples that passed in earlier steps of this run."""

    enabled: bool = False
    """First try prompts that were never tried or whose success rate (share of samples that passed in earlier steps of
    this run) is from `low` to `high`, then the others."""
    low: float = Field(default=0.1, ge=0, le=1)
    """Lowest success rate of the preferred prompts; below it, a prompt is too hard for now."""
    high: float = Field(default=0.9, ge=0, le=1)
    """Highest success rate of the preferred prompts; above it, a prompt is too easy."""
    component: str | None = None
    """Component of reward.scorers that decides whether a sample passed; null uses the reward."""
    pass_threshold: float = Field(default=1.0, allow_inf_nan=False)
    """Minimum reward, or value of `component`, for a sample to pass."""
    window: int | None = Field(default=None, ge=1)
    """Number of most recent steps that success rates are computed over; null is all. Make it longer than an epoch, so
    that prompts outside the range are tried again after a while."""

    def check_rules(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low {self.low:g} must be at most high {self.high:g}")


class SelectionConfig(Strict):
    """Which prompts a step tries and which groups it trains on; by default, all prompts of the step's batch."""

    dynamic: DynamicSamplingConfig = DynamicSamplingConfig()
    """Replacement of groups whose rewards are all equal."""
    over_sampling: OverSamplingConfig = OverSamplingConfig()
    """Number of prompts tried concurrently."""
    overlong: OverlongConfig = OverlongConfig()
    """Treatment of truncated samples."""
    curriculum: CurriculumConfig = CurriculumConfig()
    """Order of prompts."""

    def check_rules(self) -> None:
        rounds, factor = self.dynamic.max_rounds, self.over_sampling.factor
        if self.dynamic.enabled and rounds < factor:
            raise ValueError(f"dynamic.max_rounds {rounds:g} must be at least over_sampling.factor {factor:g}")
