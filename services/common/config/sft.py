"""Defines the config of a supervised run, `lockstep sft`: the same trainer section, its own data and evaluation."""

from typing import Literal, cast

from pydantic import Field, model_validator

from services.common.config.base import NAME, AnyRun
from services.common.config.data import FilesConfig
from services.common.config.evaluation import EvaluationFrequency, check_held_out
from services.common.config.layout import check_layout, check_minibatches, layout_of, samples_at_once
from services.common.config.operation import (
    BUCKET_BYTES,
    CheckpointConfig,
    ObservabilityConfig,
    RestartConfig,
    TimeoutsConfig,
)
from services.common.config.trainer import TrainerConfig, require_used


class SftDataConfig(FilesConfig):
    """The files to imitate: prompts with responses, or whole conversations."""

    max_eval_rows: int | None = Field(default=None, ge=1)
    """Number of rows to use from the start of each eval file; null uses all."""
    samples_per_step: int = Field(ge=1)
    """Number of distinct rows per step. The batch is split over ranks and micro-batches."""
    max_tokens: int = Field(default=4096, ge=2)
    """Maximum length of a row in tokens, including prompt, responses and chat template. data.overlong says what happens
    to longer rows."""
    response_column: str = "response"
    """Column with the responses: text."""
    messages_column: str | None = None
    """Column with conversations, which are lists of messages with role and content. If set, it is read instead of
    prompt_column and response_column."""
    tools_column: str | None = "tools"
    """Column with the tools of each row, if the files have it: a list of JSON schemas, or its JSON as text. The chat
    template shows them. null ignores them."""
    train_on: Literal["all", "last"] = "all"
    """Assistant messages of a conversation to train on: all, or only the last. all needs a chat template that does not
    rewrite earlier messages. A message with `"train": false` or `"weight": 0` is never trained on."""
    end_token: str | None = None
    """Token to append to a response that is not templated and does not end with it. May be unset if the model has
    exactly one stop token."""


class SftEvaluationConfig(EvaluationFrequency):
    """Evaluates on the held-out rows of data.eval: mean loss over all trained tokens, and perplexity."""


class SftConfig(AnyRun):
    """The config of a supervised run."""

    name: str = Field(default="sft", pattern=NAME)
    """Name of the run, and of its directory in runs_dir."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Random seed for data order and dropout."""
    num_steps: int | None = Field(default=None, ge=1)
    """Number of training steps, each on one batch. Set either this or num_epochs."""
    num_epochs: int | None = Field(default=None, ge=1)
    """Number of passes over the data. If the last batch is not full, rows of one more pass fill it."""
    data: SftDataConfig
    """Rows to train and evaluate on."""
    trainer: TrainerConfig
    """Training; trainer.loss.kind is sft."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints and export."""
    evaluation: SftEvaluationConfig = SftEvaluationConfig()
    """Evaluation on held-out rows."""
    timeouts: TimeoutsConfig = TimeoutsConfig()
    """Deadlines of calls."""
    restart: RestartConfig = RestartConfig()
    """Restarts of the trainer, if this command started it."""
    observability: ObservabilityConfig = ObservabilityConfig()
    """Metrics, traces, trackers and logs."""

    @property
    def models(self) -> dict[str, TrainerConfig]:
        return {"trainer": self.trainer.for_steps(self.num_steps)}

    @property
    def critic(self) -> None:
        """None: a supervised run has no value model."""

    @property
    def bucket_bytes(self) -> int:
        """The default. The trainer plans publications by it, although a supervised run publishes nothing."""
        return BUCKET_BYTES["disaggregated"]

    @model_validator(mode="before")
    @classmethod
    def _loss_is_supervised(cls, values: object) -> object:
        """Sets loss.kind to sft if it is unset; `check_rules` rejects any other kind."""
        if not isinstance(values, dict):
            return values
        table = cast(dict[str, object], values)
        trainer: object = table.get("trainer") or {}
        if not isinstance(trainer, dict):
            return table
        section = cast(dict[str, object], trainer)
        loss: object = section.get("loss") or {}
        if not isinstance(loss, dict):
            return table
        return {**table, "trainer": {**section, "loss": {"kind": "sft", **cast(dict[str, object], loss)}}}

    def check_rules(self) -> None:
        loss = self.trainer.loss
        if loss.kind != "sft":
            raise ValueError(
                f"trainer.loss.kind {loss.kind} needs samples with rewards: leave it out; a supervised run uses sft"
            )
        if loss.kl_coef:
            raise ValueError("trainer.loss.kl_coef must be 0: a supervised run has no reference model")
        if self.trainer.num_epochs > 1:
            raise ValueError("trainer.num_epochs repeats each batch: leave it out, and set num_epochs")
        if self.checkpoint.max_batches_to_keep is not None:
            raise ValueError("checkpoint.max_batches_to_keep: leave it out; a supervised run writes no batches")
        if (self.num_steps is None) == (self.num_epochs is None):
            raise ValueError("set either num_steps or num_epochs")
        require_used(self.trainer, self.trainer.strategy, key="trainer")
        if self.trainer.strategy == "megatron":
            tokens = self.trainer.max_tokens_per_microbatch
            check_layout(self.trainer.megatron, self.trainer.num_ranks, max_tokens=tokens)
        self._check_batch()
        metrics = dict.fromkeys(self.data.eval, ("nll", "perplexity"))
        check_held_out(self.evaluation, metrics, self.checkpoint.keep_best, self.checkpoint.save_freq)

    def _check_batch(self) -> None:
        samples = self.data.samples_per_step
        check_minibatches("trainer", self.trainer, "data.samples_per_step", samples)
        longest, budget = self.data.max_tokens, self.trainer.max_tokens_per_microbatch
        longest += -longest % layout_of(self.trainer).align
        uneven = samples // self.trainer.num_minibatches % samples_at_once(self.trainer)
        needed = 2 * longest if uneven else longest
        if budget < needed:
            why = ", because the samples of a mini-batch do not divide evenly by the ranks" if uneven else ""
            raise ValueError(
                f"trainer.max_tokens_per_microbatch {budget} must be at least {needed} for data.max_tokens "
                f"{self.data.max_tokens}{why}"
            )
