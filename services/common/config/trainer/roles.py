"""The models beside the policy: the reference that it is held near, and the critic that says what it may expect."""

from typing import Literal, Self

from pydantic import Field, model_validator

from services.common.config.base import Strict
from services.common.config.trainer.loss import ValueLossConfig
from services.common.config.trainer.megatron import MegatronConfig
from services.common.config.trainer.section import FsdpConfig, LoraConfig, OptimConfig, TrainerConfig


class RoleConfig(Strict):
    """A model beside the policy. What is null is as in `trainer`."""

    deployment: Literal["shared", "own"] = "shared"
    """shared: on the policy's ranks, beside it; own: on ranks of its own, another trainer service."""
    model: str | None = None
    """Model directory in the Hugging Face format, on its trainer's host; null is the policy's."""
    strategy: Literal["fsdp", "megatron"] | None = None
    """Backend."""
    num_ranks: int | None = Field(default=None, ge=1)
    """Ranks of its own deployment."""
    max_tokens_per_microbatch: int | None = Field(default=None, ge=1)
    """Token budget of one packed forward."""
    fsdp: FsdpConfig | None = None
    """Used by strategy fsdp."""
    megatron: MegatronConfig | None = None
    """Used by strategy megatron: its own parallel sizes."""

    @model_validator(mode="after")
    def _shared_ranks_are_the_policys(self) -> Self:
        if self.deployment == "shared" and self.num_ranks is not None:
            raise ValueError("num_ranks is of a deployment of its own: set deployment: own, or leave it out")
        return self

    def settings(self, trainer: TrainerConfig) -> TrainerConfig:
        """What its ranks are given."""
        names = ("strategy", "num_ranks", "max_tokens_per_microbatch", "fsdp", "megatron")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return trainer.model_copy(update={"lora": LoraConfig(), **given})


class ReferenceConfig(RoleConfig):
    """The frozen model that a KL penalty, of the loss or of the reward, holds the policy near."""


class CriticSettings(TrainerConfig):
    """What a critic's ranks are given."""

    value_loss: ValueLossConfig = ValueLossConfig()
    """Its loss."""


class CriticConfig(RoleConfig):
    """A value model for advantage.kind gae: the model's body under a head of one number, trained on the returns."""

    warmup_steps: int = Field(default=0, ge=0)
    """Batches that it alone is trained on before the first step."""
    num_minibatches: int | None = Field(default=None, ge=1)
    """Optimizer updates per batch; null is as in `trainer`."""
    optim: OptimConfig = OptimConfig()
    """Its own optimizer and schedule."""
    loss: ValueLossConfig = ValueLossConfig()
    """Its loss."""

    def settings(self, trainer: TrainerConfig) -> CriticSettings:
        """What its ranks are given."""
        minibatches = {} if self.num_minibatches is None else {"num_minibatches": self.num_minibatches}
        common = super().settings(trainer).model_copy(update={"optim": self.optim, **minibatches})
        return CriticSettings(**dict(common), value_loss=self.loss)
