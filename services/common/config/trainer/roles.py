"""Defines the config of the other models: the reference of the KL penalties and the critic, which predicts returns."""

from typing import Literal, Self

from pydantic import Field, model_validator

from services.common.config.base import Strict
from services.common.config.trainer.lag import LagConfig
from services.common.config.trainer.loss import ValueLossConfig
from services.common.config.trainer.megatron import MegatronConfig
from services.common.config.trainer.section import FsdpConfig, LoraConfig, OptimConfig, TrainerConfig


class RoleConfig(Strict):
    """Configures a model other than the policy. Keys that are null are taken from `trainer`."""

    deployment: Literal["shared", "own"] = "shared"
    """shared: run on the policy's ranks; own: run on a trainer service of its own."""
    model: str | None = None
    """Path of the model on its trainer's host, or a model on the Hugging Face Hub, as in `model`; null uses that of the
    policy."""
    strategy: Literal["fsdp", "megatron"] | None = None
    """Training backend; null uses trainer.strategy."""
    num_ranks: int | None = Field(default=None, ge=1)
    """Number of ranks, with deployment: own only; null uses trainer.num_ranks."""
    max_tokens_per_microbatch: int | None = Field(default=None, ge=1)
    """Token budget of one packed forward pass on one rank; null uses trainer.max_tokens_per_microbatch."""
    fsdp: FsdpConfig | None = None
    """FSDP2 settings, used by strategy fsdp; null uses trainer.fsdp."""
    megatron: MegatronConfig | None = None
    """Megatron settings such as parallel sizes, used by strategy megatron; null uses trainer.megatron."""

    @model_validator(mode="after")
    def _shared_ranks_are_the_policys(self) -> Self:
        if self.deployment == "shared" and self.num_ranks is not None:
            raise ValueError("num_ranks is only for deployment: own; set that, or leave num_ranks out")
        return self

    def settings(self, trainer: TrainerConfig) -> TrainerConfig:
        """Returns the settings for the ranks of this model."""
        names = ("strategy", "num_ranks", "max_tokens_per_microbatch", "fsdp", "megatron")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return trainer.model_copy(update={"lora": LoraConfig(), "lag": LagConfig(), **given})


class ReferenceConfig(RoleConfig):
    """Configures the frozen reference model of the KL penalties in the loss and in the reward."""


class CriticSettings(TrainerConfig):
    """Holds the settings for the ranks of a critic."""

    value_loss: ValueLossConfig = ValueLossConfig()
    """Loss of the critic."""


class CriticConfig(RoleConfig):
    """Configures the value model for advantage.kind gae: the model's body with a scalar head, trained on returns."""

    warmup_steps: int = Field(default=0, ge=0)
    """Number of batches that only the critic is trained on, before the first step."""
    num_minibatches: int | None = Field(default=None, ge=1)
    """Mini-batches per batch, each an optimizer update; null uses trainer.num_minibatches."""
    num_epochs: int | None = Field(default=None, ge=1)
    """Passes over the mini-batches of a batch; null uses trainer.num_epochs."""
    optim: OptimConfig = OptimConfig()
    """Optimizer and schedule of the critic."""
    loss: ValueLossConfig = ValueLossConfig()
    """Loss of the critic."""

    def settings(self, trainer: TrainerConfig) -> CriticSettings:
        """Returns the settings for the ranks of the critic."""
        counts = {"num_minibatches": self.num_minibatches, "num_epochs": self.num_epochs}
        given = {name: count for name, count in counts.items() if count is not None}
        common = super().settings(trainer).model_copy(update={"optim": self.optim, **given})
        return CriticSettings(**dict(common), value_loss=self.loss)
