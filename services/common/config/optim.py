"""Defines the config section `optim` of what is trained: the optimizer, its learning rate and its schedule."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from services.common.config.base import Strict

_Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Strict):
    """The optimizer and its learning-rate schedule."""

    kind: Literal["adamw", "muon"] = "adamw"
    """adamw: AdamW (arXiv 1711.05101). muon, with strategy fsdp: Muon (arXiv 2502.16982, momentum 0.95) for the layers'
    matrices, scaled so that lr and weight_decay have the values that AdamW would have; AdamW for all else: embeddings,
    the output layer, norms, biases and stacked experts."""
    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)
    """Decay rates of the first and second moments, each at least 0 and below 1."""
    eps: float = Field(default=1e-8, gt=0)
    """Constant added to the square root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay. It is not applied to norms and biases."""
    weight_decay_end: float | None = Field(default=None, ge=0)
    """Final weight decay, reached after weight_decay_steps. Required by the schedules linear and cosine."""
    weight_decay_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the change from weight_decay to weight_decay_end; constant keeps weight_decay."""
    weight_decay_steps: int | None = Field(default=None, ge=1)
    """Number of optimizer updates until weight_decay_end. Required by the schedules linear and cosine."""
    max_grad_norm: float = 1.0
    """Gradient clipping: gradients are scaled down if their global 2-norm is above this, which must be above 0. A large
    value, such as 1e9, turns clipping off."""
    on_nonfinite: Literal["skip", "fail"] = "skip"
    """What to do with an update whose gradient is not finite (infinity or NaN). skip: apply nothing of it, count it in
    the metric `skipped` and warn; the schedule and the version advance. The run ends once 5 batches in a row were
    skipped entirely. fail: end the run at the first one."""
    schedule: Literal["constant", "linear", "cosine", "inverse_square_root", "wsd"] = "constant"
    """Learning-rate schedule after the warmup; wsd is warmup-stable-decay (arXiv 2404.06395)."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of optimizer updates of linear warmup; the last of them uses the peak learning rate. 0 is no warmup."""
    warmup_init_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate that the warmup rises from, as a fraction of lr. With 0 the first update uses lr / warmup_steps."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Number of optimizer updates, including the warmup, after which the learning rate is lr * min_lr_ratio. Required
    by every schedule except constant. inverse_square_root does not decay to that value gradually, but drops to it."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Final learning rate as a fraction of lr."""
    wsd_decay_steps: int | None = Field(default=None, ge=1)
    """Number of optimizer updates of the decay phase of schedule wsd, at the end of decay_steps. Required by wsd."""
    wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "exponential"
    """Shape of the decay phase of schedule wsd."""

    @field_validator("max_grad_norm")
    @classmethod
    def _is_positive(cls, value: float) -> float:
        if value <= 0:  # which elsewhere means no clipping
            raise ValueError(f"must be above 0, not {value:g}; a large value, such as 1e9, turns clipping off")
        return value

    def check_rules(self) -> None:
        if self.schedule != "constant" and self.decay_steps is None:
            raise ValueError(f"schedule {self.schedule} needs decay_steps, the updates until the final learning rate")
        if "schedule" not in self.model_fields_set and (self.decay_steps or self.min_lr_ratio):
            raise ValueError("decay_steps and min_lr_ratio need schedule: by default, the learning rate stays as it is")
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ValueError(f"decay_steps {self.decay_steps} must be above warmup_steps {self.warmup_steps}")
        if (self.schedule == "wsd") != (self.wsd_decay_steps is not None):
            raise ValueError("wsd_decay_steps and schedule wsd need each other: set both or neither")
        if self.wsd_decay_steps and self.decay_steps and self.wsd_decay_steps > self.decay_steps - self.warmup_steps:
            raise ValueError(
                f"wsd_decay_steps {self.wsd_decay_steps} must be at most decay_steps {self.decay_steps} "
                f"- warmup_steps {self.warmup_steps}: the decay cannot start before the warmup has ended"
            )
        changes = self.weight_decay_schedule != "constant"
        if changes != (self.weight_decay_end is not None) or changes != (self.weight_decay_steps is not None):
            raise ValueError(
                "weight_decay_schedule linear and cosine need weight_decay_end and weight_decay_steps; constant allows "
                "neither"
            )
