"""When the held-out sets of data.eval are evaluated, and how each is sampled and counted."""

import difflib
from typing import Self

from pydantic import Field, model_validator

from services.common.config.base import Strict
from services.common.config.data import DataConfig
from services.common.config.rollout import RolloutConfig, Temperature


class EvalSetConfig(Strict):
    """How one set of data.eval is sampled and what is reported of it; by default one greedy completion per prompt."""

    temperature: Temperature = 0.0
    """Softmax temperature; 0 is greedy, others are at least 0.01."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of one answer; as in evaluation.max_tokens if unset."""
    num_samples: int = Field(default=1, ge=1)
    """Completions of each prompt, n; the reward that is reported is the mean of all (avg@n)."""
    max_prompts: int | None = Field(default=None, ge=1)
    """Only the first prompts, of those that data.max_eval_prompts leaves; all if unset."""
    pass_k: tuple[int, ...] = ()
    """Report pass@k for these k, each at most num_samples: the chance that one of k completions passes."""
    pass_threshold: float = Field(default=1.0, allow_inf_nan=False)
    """A completion passes if its reward is at least this."""

    @model_validator(mode="after")
    def _samples_suffice(self) -> Self:
        if min(self.pass_k, default=1) < 1:
            raise ValueError(f"pass_k {min(self.pass_k)} must be at least 1")
        if max(self.pass_k, default=0) > self.num_samples:
            raise ValueError(
                f"pass_k {max(self.pass_k)} is above num_samples {self.num_samples}: raise num_samples to at least "
                f"{max(self.pass_k)}, better to several times that"
            )
        return self

    @model_validator(mode="after")
    def _samples_vary(self) -> Self:
        if self.num_samples > 1 and not self.temperature > 0:
            raise ValueError(
                f"num_samples {self.num_samples} needs a temperature above 0: greedy samples of a prompt are equal"
            )
        return self


class EvaluationConfig(Strict):
    """Evaluation on the held-out prompts of data.eval."""

    eval_freq: int = Field(default=0, ge=0)
    """Steps between evaluations, 0 for none; the last step is evaluated too unless this is 0."""
    eval_before_train: bool = True
    """Evaluate the first published weights."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of one answer; as in training if unset."""
    sets: dict[str, EvalSetConfig] = Field(default_factory=dict)
    """Sampling and metrics by the name of a set in data.eval; a set without settings is sampled greedily, once."""

    def settings(self, name: str) -> EvalSetConfig:
        """Of the set `name`; its `max_tokens` is None only where both are unset."""
        settings = self.sets.get(name, EvalSetConfig())
        return settings.model_copy(update={"max_tokens": settings.max_tokens or self.max_tokens})


def check_evaluation(evaluation: EvaluationConfig, data: DataConfig, rollout: RolloutConfig) -> None:
    """The rules between the sections.

    Raises:
        ValueError: There is nothing to evaluate, a set does not exist, or an answer may not fit the engine.
    """
    if evaluation.eval_freq and not data.eval:
        raise ValueError("evaluation.eval_freq is set but data.eval names no file")
    for name in evaluation.sets:
        if name not in data.eval:
            close = difflib.get_close_matches(name, data.eval, n=1, cutoff=0.0)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"evaluation.sets.{name}: data.eval has {', '.join(data.eval) or 'no set'}{hint}")
    for name in data.eval:
        longest = data.max_prompt_tokens + (evaluation.settings(name).max_tokens or 0)
        if longest > rollout.max_model_len:
            raise ValueError(
                f"evaluation: data.max_prompt_tokens + max_tokens of set {name} = {longest} is above "
                f"rollout.max_model_len = {rollout.max_model_len}; raise that to at least {longest}"
            )
