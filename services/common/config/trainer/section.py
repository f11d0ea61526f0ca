"""What the trainer service reads: strategy, loss, optimizer."""

from typing import Any, Literal, Self, cast

from pydantic import Field, model_validator

from services.common.config.base import Strict
from services.common.config.trainer.loss import LossConfig
from services.common.config.trainer.megatron import MegatronConfig


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
    weight_decay_end: float | None = Field(default=None, ge=0)
    """Weight decay after weight_decay_steps; null keeps it constant."""
    weight_decay_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Way from weight_decay to weight_decay_end."""
    weight_decay_steps: int | None = Field(default=None, ge=1)
    """Optimizer updates until weight_decay_end."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global 2-norm."""
    schedule: Literal["constant", "linear", "cosine", "inverse_square_root", "wsd"] = "constant"
    """Shape of the learning rate after the warm-up; wsd is warm-up, stable, decay (arXiv 2404.06395)."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer updates until the peak, linear; the last of them has it."""
    warmup_init_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate that the warm-up starts above, over the peak: with 0 the first update has lr / warmup_steps."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Optimizer updates, warm-up included, until lr * min_lr_ratio; needed by every schedule but constant.
    inverse_square_root does not reach it by itself, it jumps there."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Last learning rate over the peak."""
    wsd_decay_steps: int | None = Field(default=None, ge=1)
    """The last so many of decay_steps are wsd's decay."""
    wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "exponential"
    """Shape of wsd's decay."""

    @model_validator(mode="after")
    def _decay_needs_steps(self) -> Self:
        if self.schedule != "constant" and self.decay_steps is None:
            raise ValueError(f"schedule {self.schedule} needs decay_steps, the updates until the last learning rate")
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ValueError(f"decay_steps {self.decay_steps} must be above warmup_steps {self.warmup_steps}")
        if (self.schedule == "wsd") != (self.wsd_decay_steps is not None):
            raise ValueError("wsd_decay_steps and schedule wsd need each other: set both or neither")
        if self.wsd_decay_steps and self.decay_steps and self.wsd_decay_steps > self.decay_steps - self.warmup_steps:
            raise ValueError(
                f"wsd_decay_steps {self.wsd_decay_steps} must be at most decay_steps {self.decay_steps} "
                f"- warmup_steps {self.warmup_steps}: the decay cannot start before the warm-up has ended"
            )
        return self

    @model_validator(mode="after")
    def _weight_decay_is_whole(self) -> Self:
        changes = self.weight_decay_schedule != "constant"
        if changes != (self.weight_decay_end is not None) or changes != (self.weight_decay_steps is not None):
            raise ValueError(
                "weight_decay_schedule linear and cosine need weight_decay_end and weight_decay_steps, constant neither"
            )
        return self


class FsdpConfig(Strict):
    """Settings of torch FSDP2 (fully_shard)."""

    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory between uses."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward; False trades memory for fewer gathers."""
    reduce_each_microbatch: bool = False
    """Reduce gradients with every micro-batch; else once with the last, and until then each rank holds whole ones."""
    torch_compile: bool = True
    """Compile the layers, on GPU: fewer kernels and less memory, for a minute at the first update."""


MAX_PUBLISHED_RANK = 512


class LoraConfig(Strict):
    """Low-rank adapters (arXiv 2106.09685): the base is frozen, only the adapters are trained and saved."""

    rank: int = Field(default=0, ge=0)
    """Rank of the adapters; 0 trains the whole model."""
    alpha: float = Field(default=16.0, gt=0)
    """The adapter's output is scaled by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of the adapter's input while training."""
    kind: Literal["lora", "canonical_lora"] = "lora"
    """lora: one adapter per fused matrix (q, k, v share A; so do gate, up); canonical_lora: one for each of them."""
    target_modules: tuple[str, ...] = ()
    """lora: linear_qkv, linear_proj, linear_fc1, linear_fc2; canonical_lora: linear_q, linear_k, linear_v, linear_proj,
    linear_fc1_gate, linear_fc1_up, linear_fc2. Empty is all of the kind."""
    exclude_modules: tuple[str, ...] = ()
    """Shell patterns of module names that get no adapter, such as decoder.layers.0.*."""
    publish: Literal["merged", "adapter"] = "merged"
    """Publish whole merged weights, or only the adapter, which the engine adds to its own copy of the base."""

    @property
    def published_rank(self) -> int:
        """Rank of the adapters that engines get beside the base; 0 if they get merged weights."""
        return self.rank if self.publish == "adapter" else 0

    @model_validator(mode="after")
    def _adapter_can_be_published(self) -> Self:
        if self.publish == "adapter" and not 0 < self.rank <= MAX_PUBLISHED_RANK:
            raise ValueError(
                f"lora.publish adapter needs lora.rank from 1 to {MAX_PUBLISHED_RANK} (the largest that vLLM serves), "
                f"not {self.rank}; set lora.rank, or lora.publish merged"
            )
        return self


class ProfilerConfig(Strict):
    """torch.profiler over some updates of some ranks."""

    ranks: tuple[int, ...] = ()
    """Ranks that are profiled; empty is none."""
    first_step: int = Field(default=1, ge=0)
    """First profiled update; the first of a run compiles and allocates."""
    num_steps: int = Field(default=1, ge=1)
    """Profiled updates, all in one Chrome trace per rank."""
    record_shapes: bool = False
    """Keep the shapes of operators' inputs."""
    profile_memory: bool = False
    """Keep allocations."""
    with_stack: bool = False
    """Keep Python stacks; slow."""
    directory: str = "profile"
    """Where the trainer's ranks write traces, on their own hosts."""
    memory_snapshot: bool = False
    """Record allocations on GPU, and write a memory snapshot into `directory` when memory runs out."""


class TrainerConfig(Strict):
    """The update of the policy."""

    strategy: Literal["fsdp", "megatron"] = "fsdp"
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
    lora: LoraConfig = LoraConfig()
    """Adapters; strategy megatron only."""
    fsdp: FsdpConfig = FsdpConfig()
    """Used by strategy fsdp."""
    megatron: MegatronConfig = MegatronConfig()
    """Used by strategy megatron, for the policy."""
    profiler: ProfilerConfig = ProfilerConfig()
    """Traces of where the time and the memory go."""

    @model_validator(mode="after")
    def _lora_needs_megatron(self) -> Self:
        if self.lora.rank and self.strategy != "megatron":
            raise ValueError("lora.rank is above 0: adapters need strategy megatron")
        return self


def require_used(section: Strict, strategy: str, *, key: str) -> None:
    """Raises ValueError if the model section at `key` sets something that its `strategy` does not read."""
    other = "fsdp" if strategy == "megatron" else "megatron"
    value: Any = section.model_dump(include={other}, exclude_defaults=True).get(other)
    path = f"{key}.{other}"
    while isinstance(value, dict) and value:
        name, value = next(iter(cast(dict[str, Any], value).items()))
        path += f".{name}"
    if path != f"{key}.{other}":
        raise ValueError(f"{path} is not used by strategy {strategy}: set {key}.strategy={other}, or leave it out")
