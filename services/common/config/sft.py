"""The config tree of a supervised run, `lockstep sft`: the trainer's own section, and what differs from a run."""

from pathlib import Path
from typing import Any, Literal, Self, cast

from pydantic import Field, model_validator

from services.common.config.base import NAME, Strict
from services.common.config.data import FilesConfig
from services.common.config.observability import ObservabilityConfig
from services.common.config.run import CheckpointConfig, TimeoutsConfig, WeightsConfig
from services.common.config.trainer.section import TrainerConfig, require_used
from services.common.megatron.layout import Layout, check_layout, samples_at_once


class SftDataConfig(FilesConfig):
    """Answers to imitate, as Parquet files: prompt and response, or whole conversations."""

    max_eval_rows: int | None = Field(default=None, ge=1)
    """Only the first rows of each eval file; all if unset."""
    samples_per_step: int = Field(ge=1)
    """Rows of one batch, all different; the batch is split over ranks and micro-batches."""
    max_tokens: int = Field(default=4096, ge=2)
    """Longest row, prompt, responses and template together."""
    response_column: str = "response"
    """Column of responses: text."""
    messages_column: str | None = None
    """Column of conversations, lists of messages with role and content, read in place of prompt and response."""
    train_on: Literal["all", "last"] = "all"
    """Turns of the assistant in a conversation that are trained on. All needs a chat template that is prefix-stable."""
    end_token: str | None = None
    """Token put after a response that is not templated; the only token that ends a sample if unset."""


class SftEvaluationConfig(Strict):
    """Loss on the held-out rows of data.eval: mean over all trained tokens, and perplexity."""

    eval_freq: int = Field(default=0, ge=0)
    """Steps between evaluations, 0 for none; the last step is evaluated too unless this is 0."""
    eval_before_train: bool = True
    """Evaluate the model before the first step."""


class SftConfig(Strict):
    """A supervised run."""

    name: str = Field(default="sft", pattern=NAME)
    """Names the run's directory below runs_dir."""
    runs_dir: Path = Path("runs")
    """Where runs keep their files."""
    model: str
    """Model directory in the Hugging Face format, on the trainer's host."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Of everything random: data order, dropout."""
    num_steps: int | None = Field(default=None, ge=1)
    """Batches to train on; set this or num_epochs."""
    num_epochs: int | None = Field(default=None, ge=1)
    """Passes over the data; the last batch is filled up from the pass after."""
    resume: str = "auto"
    """auto: the newest verified checkpoint, else a fresh start; never; must; or the path of a checkpoint."""
    trace: bool = False
    """Keep spans of the loop and of every call to a service started here in trace.json, for Perfetto."""
    data: SftDataConfig
    """Rows."""
    trainer: TrainerConfig
    """Update; trainer.loss.kind is sft."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving."""
    evaluation: SftEvaluationConfig = SftEvaluationConfig()
    """Held-out loss."""
    timeouts: TimeoutsConfig = TimeoutsConfig()
    """Deadlines."""
    observability: ObservabilityConfig = ObservabilityConfig()
    """Metrics, traces, trackers and logs."""

    @property
    def run_dir(self) -> Path:
        """Directory of this run's files."""
        return self.runs_dir / self.name

    @property
    def models(self) -> dict[str, TrainerConfig]:
        """Settings by config section, as Config.models."""
        return {"trainer": self.trainer}

    @property
    def critic(self) -> None:
        """There is no value model."""

    @property
    def weights(self) -> WeightsConfig:
        """What the trainer plans its publications by; there are none."""
        return WeightsConfig()

    @model_validator(mode="before")
    @classmethod
    def _loss_is_supervised(cls, values: Any) -> Any:
        """Fills in the only loss there is; another that was asked for is left to `_loss_fits`."""
        if not isinstance(values, dict):
            return values
        table = cast(dict[str, Any], values)
        trainer: Any = table.get("trainer") or {}
        if not isinstance(trainer, dict):
            return table
        section = cast(dict[str, Any], trainer)
        loss: Any = section.get("loss") or {}
        if not isinstance(loss, dict):
            return table
        return {**table, "trainer": {**section, "loss": {"kind": "sft", **cast(dict[str, Any], loss)}}}

    @model_validator(mode="after")
    def _loss_fits(self) -> Self:
        loss = self.trainer.loss
        if loss.kind != "sft":
            raise ValueError(f"trainer.loss.kind {loss.kind} needs samples with rewards: leave it out, it is sft here")
        if loss.kl_coef:
            raise ValueError("trainer.loss.kl_coef must be 0: a supervised run has no reference model")
        return self

    @model_validator(mode="after")
    def _length_is_given(self) -> Self:
        if (self.num_steps is None) == (self.num_epochs is None):
            raise ValueError("set either num_steps or num_epochs")
        return self

    @model_validator(mode="after")
    def _other_strategy_is_not_set(self) -> Self:
        require_used(self.trainer, self.trainer.strategy, key="trainer")
        return self

    @model_validator(mode="after")
    def _layout_is_legal(self) -> Self:  # first: the rules below count data-parallel ranks
        if self.trainer.strategy == "megatron":
            tokens = self.trainer.max_tokens_per_microbatch
            check_layout(self.trainer.megatron, self.trainer.num_ranks, max_tokens=tokens)
        return self

    @model_validator(mode="after")
    def _samples_divide(self) -> Self:
        samples, minibatches = self.data.samples_per_step, self.trainer.num_minibatches
        if samples % minibatches:
            raise ValueError(
                f"data.samples_per_step {samples} must be divisible by trainer.num_minibatches {minibatches}; "
                f"nearest: {max(1, round(samples / minibatches)) * minibatches}"
            )
        if samples // minibatches < (fewest := samples_at_once(self.trainer)):
            raise ValueError(
                f"a mini-batch has {samples // minibatches} samples (data.samples_per_step / trainer.num_minibatches), "
                f"but trainer.num_ranks {self.trainer.num_ranks} need at least {fewest}"
            )
        return self

    @model_validator(mode="after")
    def _lengths_fit(self) -> Self:
        longest, budget = self.data.max_tokens, self.trainer.max_tokens_per_microbatch
        if self.trainer.strategy == "megatron":
            longest += -longest % Layout.of(self.trainer.megatron, self.trainer.num_ranks).align
        uneven = self.data.samples_per_step // self.trainer.num_minibatches % samples_at_once(self.trainer)
        needed = 2 * longest if uneven else longest
        if budget < needed:
            why = ", as the samples of a mini-batch do not divide by the ranks" if uneven else ""
            raise ValueError(
                f"trainer.max_tokens_per_microbatch {budget} must be at least {needed} for data.max_tokens "
                f"{self.data.max_tokens}{why}"
            )
        return self

    @model_validator(mode="after")
    def _evaluation_fits(self) -> Self:
        if self.evaluation.eval_freq and not self.data.eval:
            raise ValueError("evaluation.eval_freq is set but data.eval names no file")
        return self
