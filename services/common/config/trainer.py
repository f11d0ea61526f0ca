"""What the trainer service reads: strategy, loss, optimizer."""

from typing import Literal, Self

from pydantic import Field, model_validator

from services.common.config.base import Strict


class LossConfig(Strict):
    """Clipped policy gradient (PPO, arXiv 1707.06347) as GRPO uses it (arXiv 2402.03300)."""

    kind: Literal["grpo"] = "grpo"
    """Name of the loss."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Ratios below 1 - clip_low get no gradient from negative advantages."""
    clip_high: float = Field(default=0.2, gt=0)
    """Ratios above 1 + clip_high get no gradient from positive advantages (clip-higher: arXiv 2503.14476)."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the k3 estimate of KL(policy || reference) in the loss; 0 needs no reference model."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"] = "token_mean"
    """Mean over all tokens; mean over samples of their token means; or token sums over a fixed length (Dr.GRPO)."""


class OptimConfig(Strict):
    """AdamW (arXiv 1711.05101) and its learning-rate schedule."""

    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the first and second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay; not applied to norms and biases."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global 2-norm."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer updates from 0 to the peak, linear."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Optimizer updates, warm-up included, until lr * min_lr_ratio; needed by linear and cosine."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Last learning rate over the peak."""

    @model_validator(mode="after")
    def _decay_needs_steps(self) -> Self:
        if self.schedule != "constant" and self.decay_steps is None:
            raise ValueError(f"schedule {self.schedule} needs decay_steps, the updates until the last learning rate")
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ValueError(f"decay_steps {self.decay_steps} must be above warmup_steps {self.warmup_steps}")
        return self


class FsdpConfig(Strict):
    """Settings of torch FSDP2 (fully_shard)."""

    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory between uses."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward; False trades memory for fewer gathers."""


class TrainerConfig(Strict):
    """The update of the policy."""

    strategy: Literal["fsdp"] = "fsdp"
    """Backend that shards the model over the ranks."""
    num_ranks: int = Field(default=1, ge=1)
    """Trainer processes that `lockstep run` starts on this host when no address is given."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Forward and backward; auto is bfloat16 on GPU and float32 on CPU. Master weights are float32."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward instead of keeping its activations."""
    max_tokens_per_microbatch: int = Field(default=16384, ge=1)
    """Token budget of one packed forward and backward on one rank."""
    num_minibatches: int = Field(default=1, ge=1)
    """Optimizer updates per batch, each on an equal share of the prompt groups."""
    max_logprob_gap: float = Field(default=1.0, gt=0)
    """Stop, with nothing applied, when the mean |engine - trainer| log-probability of a batch is above this."""
    collective_timeout_s: float = Field(default=600.0, gt=0)
    """A collective of the trainer that lasts longer fails all ranks."""
    loss: LossConfig = LossConfig()
    """Policy loss."""
    optim: OptimConfig = OptimConfig()
    """Optimizer and schedule."""
    fsdp: FsdpConfig = FsdpConfig()
    """Used by strategy fsdp."""
