"""Defines the config section `evaluation`, and which evaluation is the best."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from services.common.config.base import Strict
from services.common.config.rollout import BadWords, EvalTemperature
from services.common.rewards import is_above


class BestConfig(Strict):
    """A held-out metric; a text alone is the metric."""

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
        return self.metric.split("/")[1]

    @property
    def name(self) -> str:
        return self.metric.split("/", 2)[2]

    def is_better(self, value: float, than: float, by: float = 0.0) -> bool:
        """Returns whether `value` is better than another by more than `by`. NaN never is."""
        return is_above(value, than, by) if self.mode == "max" else is_above(-value, -than, by)


class EarlyStoppingConfig(BestConfig):
    """Ends a run when its held-out metric stops improving."""

    patience: int = Field(default=3, ge=1)
    """The run ends after this many evaluations in a row without a better value."""
    min_delta: float = Field(default=0.0, ge=0)
    """A value counts as better only if it differs from the best one by more than this."""


class EvaluationFrequency(Strict):
    """When held-out sets are evaluated, and when that ends the run."""

    eval_freq: int = Field(default=0, ge=0)
    """Evaluate every this many steps, and after the last step; 0 leaves only eval_before_train."""
    eval_before_train: bool = True
    """Evaluate the starting weights before the first step, if data.eval names a file."""
    early_stopping: EarlyStoppingConfig | None = None
    """End the run, as if num_steps were reached, when this held-out metric stops improving; null trains all steps."""


def no_set(name: str, sets: Collection[str]) -> str:
    """Returns the words of an error for a name that is not among the `sets` of data.eval."""
    return f"data.eval has no {name}, {'only ' + ', '.join(sets) if sets else 'because it is empty'}"


def check_held_out(
    evaluation: EvaluationFrequency, held_out: Mapping[str, Sequence[str]], keep_best: BestConfig | None, save_freq: int
) -> None:
    """Raises ValueError if `evaluation` does not fit the sets of data.eval, or the section `checkpoint`.

    `held_out` has the names of the metrics of each set; `...` in a name stands for any text.
    """
    eval_freq = evaluation.eval_freq
    if eval_freq and not held_out:
        raise ValueError("evaluation.eval_freq is set but data.eval names no file")
    named = {"checkpoint.keep_best": keep_best, "evaluation.early_stopping": evaluation.early_stopping}
    for key, config in named.items():
        if config is None:
            continue
        if config.set_name not in held_out:
            raise ValueError(f"{key}.metric {config.metric}: {no_set(config.set_name, held_out)}")
        names = held_out[config.set_name]
        if not any(re.fullmatch(re.escape(name).replace(r"\.\.\.", "(?s:.*)"), config.name) for name in names):
            raise ValueError(
                f"{key}.metric {config.metric}: {config.set_name} has no {config.name}, only {', '.join(names)}"
            )
        if not eval_freq:
            raise ValueError(f"{key} is set but evaluation.eval_freq is 0: set how often to evaluate")
    if keep_best and (not save_freq or eval_freq % save_freq):
        raise ValueError(
            f"checkpoint.keep_best needs a checkpoint of every evaluated step: evaluation.eval_freq {eval_freq} must "
            f"be a multiple of checkpoint.save_freq {save_freq}, which must be above 0"
        )


class EvalSetConfig(Strict):
    """How one set of data.eval is sampled and reported; by default with one greedy completion per prompt."""

    temperature: EvalTemperature = 0.0
    """Sampling temperature: 0 for greedy decoding, or at least 0.01."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: keep only the most probable tokens whose probabilities sum up to this; 1 keeps all."""
    top_k: int = Field(default=0, ge=0)
    """Keep only this many most probable tokens; 0 keeps all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Keep only tokens with at least this share of the largest probability; 0 keeps all."""
    repetition_penalty: float = Field(default=1.0, gt=0, le=100)
    """Divide the logits of tokens that prompt or completion already have by this if positive, else multiply them; 1
    changes none."""
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Subtract this from the logits of tokens that the completion already has."""
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Subtract this from the logits of tokens, as often as the completion already has them."""
    min_tokens: int = Field(default=0, ge=0)
    """Sample no stop token, and look for no stop string, before this many tokens."""
    bad_words: BadWords = ()
    """Texts that are not sampled, as in rollout.sampling.bad_words, whose texts this set does not inherit."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens per completion; null uses evaluation.max_tokens."""
    num_samples: int = Field(default=1, ge=1)
    """Number n of completions per prompt. The reported reward is the mean over all of them (avg@n)."""
    max_prompts: int | None = Field(default=None, ge=1)
    """Number of prompts to use from the start of this set, after data.max_eval_prompts is applied; null uses all."""
    pass_k: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Values of k to report pass@k for, each at most num_samples. pass@k is the estimated probability that at least one
    of k completions passes."""
    pass_threshold: float = 1.0
    """Minimum reward for a completion to count as passed in pass@k."""

    def check_rules(self) -> None:
        if max(self.pass_k, default=0) > self.num_samples:
            raise ValueError(
                f"pass_k {max(self.pass_k)} is above num_samples {self.num_samples}: raise num_samples to at least "
                f"{max(self.pass_k)}, preferably to several times that"
            )
        if self.num_samples > 1 and not self.temperature > 0:
            raise ValueError(
                f"num_samples {self.num_samples} needs a temperature above 0: all greedy samples of a prompt are "
                "identical"
            )
        if not self.temperature > 0 and (self.top_p, self.top_k, self.min_p) != (1.0, 0, 0.0):
            raise ValueError("top_p, top_k and min_p need a temperature above 0: greedy decoding does not read them")


class EvaluationConfig(EvaluationFrequency):
    """Evaluation on the held-out prompts of data.eval."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens per completion; null uses rollout.sampling.max_tokens."""
    sets: dict[str, EvalSetConfig] = Field(default_factory=dict)
    """Settings of each set, by its name in data.eval. A set without settings gets one greedy completion per prompt."""

    def settings(self, name: str) -> EvalSetConfig:
        """Returns the settings of the set `name`; `max_tokens` is None only if neither set nor section sets it."""
        settings = self.sets.get(name, EvalSetConfig())
        return settings.model_copy(update={"max_tokens": settings.max_tokens or self.max_tokens})

    def metrics(self, name: str, components: Sequence[str], column: str | None) -> list[str]:
        """Returns the names of all metrics that the set `name` can have; `...` stands for any text.

        Args:
            name: The set's name in data.eval.
            components: The names of the scorers, and of an environment.
            column: data.metrics_column.
        """
        of_values = [f"reward[{column.replace('/', '|')}=...]"] if column else []
        passed = [f"pass@{k}" for k in self.settings(name).pass_k]
        return list(dict.fromkeys(["reward", *passed, "tokens_mean", "truncated", "failed", *components, *of_values]))
