"""What the reward service reads: which scorers, their weights, and what a sample without a score means."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from services.common.config.base import Strict
from services.common.config.reward.code import CodeConfig
from services.common.config.reward.model import ModelConfig
from services.common.config.reward.remote import HttpConfig, JudgeConfig
from services.common.config.reward.scorer import ITEM_FIELDS, BaseScorerConfig


class ExactConfig(BaseScorerConfig):
    """1 if completion and answer are the same text, else 0; white space at the ends does not count."""

    kind: Literal["exact"] = "exact"
    """Compares text."""
    ignore_case: bool = False
    """Compare without regard to case."""


class Gsm8kConfig(BaseScorerConfig):
    """1 if the number after the last #### equals the one of the answer, else 0."""

    kind: Literal["gsm8k"] = "gsm8k"
    """Compares final numbers."""
    require_marker: bool = False
    """Without #### the score is 0; otherwise the last number of the completion counts."""


class MathConfig(BaseScorerConfig):
    """1 if math-verify finds the last boxed answer equal to the dataset's, else 0."""

    kind: Literal["math"] = "math"
    """Compares mathematics."""
    require_boxed: bool = False
    """Without \\boxed{} the score is 0; otherwise the last formula or number near the end counts."""


class FormatConfig(BaseScorerConfig):
    """1 if the whole completion matches a regular expression, else 0."""

    kind: Literal["format"] = "format"
    """Checks the form."""
    pattern: str
    """Python regular expression for the whole completion; `.` matches line breaks too."""

    @model_validator(mode="after")
    def _compiles(self) -> Self:
        try:
            re.compile(self.pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"pattern {self.pattern!r} is not a regular expression: {error}") from error
        return self


class LengthConfig(BaseScorerConfig):
    """Penalty: 0 up to target_tokens, falling linearly to -1 at max_tokens (arXiv 2503.14476, eq. 13)."""

    kind: Literal["length"] = "length"
    """Penalises length."""
    target_tokens: int = Field(ge=0)
    """No penalty up to here."""
    max_tokens: int = Field(ge=1)
    """The penalty is -1 from here."""

    @model_validator(mode="after")
    def _falls(self) -> Self:
        if self.max_tokens <= self.target_tokens:
            raise ValueError(f"max_tokens {self.max_tokens} must be above target_tokens {self.target_tokens}")
        return self


class PythonConfig(BaseScorerConfig):
    """A function of yours, importable where the reward service runs; it may be async and returns a number."""

    kind: Literal["python"] = "python"
    """Calls your function."""
    path: str = Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")
    """package.module:function; called by keyword: prompt, answer, extra, completion, num_tokens, finish_reason."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """More keyword arguments for it."""
    group: bool = False
    """Call it once for a prompt group, with lists of equal length; it returns a list of numbers."""

    @model_validator(mode="after")
    def _no_clash(self) -> Self:
        taken = sorted(set(self.kwargs) & set(ITEM_FIELDS))
        if taken:
            raise ValueError(f"kwargs {', '.join(taken)}: passed by the service itself; rename")
        return self


ScorerConfig = Annotated[
    ExactConfig
    | Gsm8kConfig
    | MathConfig
    | FormatConfig
    | LengthConfig
    | PythonConfig
    | JudgeConfig
    | HttpConfig
    | ModelConfig
    | CodeConfig,
    Field(discriminator="kind"),
]


class RewardConfig(Strict):
    """Reward of a sample: the weighted sum of its scores."""

    scorers: tuple[ScorerConfig, ...] = Field(min_length=1)
    """At least one, each with its kind."""
    timeout_s: float = Field(default=5.0, gt=0, le=3600)
    """Most seconds for a sample (or group, for scorers of groups) from when a worker takes it, which is then killed."""
    num_workers: int = Field(default=2, ge=1, le=1024)
    """Worker processes of each math, format and python scorer."""
    max_memory_gib: float = Field(default=4.0, gt=0.1)
    """Address space of one worker, in GiB; a scorer that imports CUDA libraries needs far more than it uses."""
    on_failure: Literal["zero", "drop_group", "fail"] = "drop_group"
    """A sample without a score: its reward is 0, its prompt group is left out of the batch, or the run stops."""

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [scorer.component for scorer in self.scorers]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"scorers: {', '.join(twice)} is used twice; give each a `name` of its own")
        return self
