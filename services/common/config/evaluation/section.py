"""Defines the config section `evaluation`: when and how the held-out sets of data.eval are evaluated."""

import difflib
from typing import Self

from pydantic import Field, model_validator

from services.common.config.base import Strict
from services.common.config.data import DataConfig
from services.common.config.evaluation.best import EvaluationFrequency
from services.common.config.rollout.section import BadWords, EvalTemperature, RolloutConfig


class EvalSetConfig(Strict):
    """Says how one set of data.eval is sampled and reported; by default with one greedy completion per prompt."""

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
    pass_k: tuple[int, ...] = ()
    """Values of k to report pass@k for, each at most num_samples. pass@k is the estimated probability that at least one
    of k completions passes."""
    pass_threshold: float = Field(default=1.0, allow_inf_nan=False)
    """Minimum reward for a completion to count as passed in pass@k."""

    @model_validator(mode="after")
    def _samples_suffice(self) -> Self:
        if min(self.pass_k, default=1) < 1:
            raise ValueError(f"pass_k {min(self.pass_k)} must be at least 1")
        if max(self.pass_k, default=0) > self.num_samples:
            raise ValueError(
                f"pass_k {max(self.pass_k)} is above num_samples {self.num_samples}: raise num_samples to at least "
                f"{max(self.pass_k)}, preferably to several times that"
            )
        return self

    @model_validator(mode="after")
    def _length_is_possible(self) -> Self:
        if self.max_tokens and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} must be at most max_tokens {self.max_tokens}")
        return self

    @model_validator(mode="after")
    def _samples_vary(self) -> Self:
        if self.num_samples > 1 and not self.temperature > 0:
            raise ValueError(
                f"num_samples {self.num_samples} needs a temperature above 0: all greedy samples of a prompt are "
                "identical"
            )
        return self

    @model_validator(mode="after")
    def _truncation_is_of_samples(self) -> Self:
        if not self.temperature > 0 and (self.top_p, self.top_k, self.min_p) != (1.0, 0, 0.0):
            raise ValueError("top_p, top_k and min_p need a temperature above 0: greedy decoding does not read them")
        return self


class EvaluationConfig(EvaluationFrequency):
    """Configures evaluation on the held-out prompts of data.eval."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens per completion; null uses rollout.sampling.max_tokens."""
    sets: dict[str, EvalSetConfig] = Field(default_factory=dict)
    """Settings of each set, by its name in data.eval. A set without settings gets one greedy completion per prompt."""

    def settings(self, name: str) -> EvalSetConfig:
        """Returns the settings of the set `name`; `max_tokens` is None only if neither set nor section sets it."""
        settings = self.sets.get(name, EvalSetConfig())
        return settings.model_copy(update={"max_tokens": settings.max_tokens or self.max_tokens})


def check_evaluation(evaluation: EvaluationConfig, data: DataConfig, rollout: RolloutConfig) -> None:
    """Checks the rules that involve several sections.

    Raises:
        ValueError: There is nothing to evaluate, a set does not exist, or a completion may exceed the engine's limit.
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
