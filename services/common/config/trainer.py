"""Defines the config section `trainer`: strategy, loss, optimizer, adapters, router replay and other roles."""

from collections.abc import Mapping
from typing import Annotated, Literal, Self, cast

from pydantic import BeforeValidator, Field

from services.common.config.base import AT_HOME, Compile, Seconds, Strict, compiles
from services.common.config.loss import LagConfig, LossConfig, ValueLossConfig, check_lag
from services.common.config.megatron import MegatronConfig
from services.common.config.optim import OptimConfig
from services.common.errors import PreconditionFailed


def _as_word(value: object) -> object:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


# YAML reads on and off without quotes as true and false.
_IS_WORD = BeforeValidator(_as_word)


class RoutingConfig(Strict):
    """How a policy with mixture-of-experts layers is trained; no effect on a dense model."""

    router_replay: Annotated[Literal["auto", "on", "off"], _IS_WORD] = "auto"
    """Routing replay (R3, arXiv 2510.11370): compute each token with the experts that the engine chose for it, in the
    forward pass, in recomputation and so in the backward pass. Their weights still come from the trainer's router,
    which gets gradients. auto: replay if layers of the model have experts, the engine can return its choices, and
    the config allows it (no stop strings, and with Megatron no moe_router_fusion, sinkhorn or CUDA graphs); on: fail
    if it is not possible; off: use the experts that the trainer's router chooses."""


def ignores_routed_experts(megatron: MegatronConfig) -> str:
    """Returns the setting with which Megatron would ignore routed experts; an empty string if there is none."""
    options = megatron.transformer_config_kwargs
    if options.get("moe_router_fusion"):
        return "megatron.transformer_config_kwargs.moe_router_fusion"
    if options.get("cuda_graph_impl", "none") != "none":
        return "megatron.transformer_config_kwargs.cuda_graph_impl"
    if "sinkhorn" in (megatron.moe.load_balancing_type, options.get("moe_router_load_balancing_type")):
        return "megatron.moe.load_balancing_type sinkhorn"
    return ""


class FsdpConfig(Strict):
    """torch FSDP2 (fully_shard)."""

    cpu_offload: bool = False
    """Offload parameters, gradients and optimizer state to host memory while they are not in use."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward pass and again after its backward pass; false keeps them until
    the update, which uses more memory and saves all-gathers."""
    reduce_each_microbatch: bool = False
    """Reduce-scatter gradients after every micro-batch. false reduces them once, after the last micro-batch, and until
    then keeps unsharded gradients on each rank."""
    async_save: bool = False
    """Copy a checkpoint to host memory and continue training while it is written to disk."""
    torch_compile: Compile = "auto"
    """Compile the layers with torch.compile, on GPU only. This launches fewer kernels and uses less memory; the first
    update takes up to a minute longer. auto: in runs of at least 50 steps, in which that pays. Micro-batches of fewer
    than 5,120 tokens, or of half of max_tokens_per_microbatch if that is less, run as they are."""


MAX_PUBLISHED_RANK = 512


class LoraConfig(Strict):
    """Low-rank adapters (arXiv 2106.09685): the base is frozen; only adapters are trained and saved."""

    rank: int = Field(default=0, ge=0)
    """LoRA rank; 0 turns LoRA off and trains the whole model."""
    alpha: float = Field(default=16.0, gt=0)
    """LoRA alpha: the adapter's output is scaled by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability of the adapter's input during training, with strategy megatron."""
    kind: Literal["lora", "canonical_lora"] = "lora"
    """lora: one adapter per fused matrix, so that q, k and v share their A matrix, as do gate and up; canonical_lora:
    separate adapters for q, k, v, gate and up. In a model that the registry does not know, which strategy fsdp trains,
    each linear layer has an adapter of its own with both."""
    target_modules: tuple[str, ...] = ()
    """Modules that get an adapter; empty is all. The choices for lora are linear_qkv, linear_proj, linear_fc1 and
    linear_fc2; for canonical_lora they are linear_q, linear_k, linear_v, linear_proj, linear_fc1_gate, linear_fc1_up
    and linear_fc2. In a model that the registry does not know, they are the last parts of the names of linear layers in
    the checkpoint, such as q_proj."""
    exclude_modules: tuple[str, ...] = ()
    """Shell patterns for the names of modules that get no adapter, such as decoder.layers.0.*, or model.layers.0.* in a
    model that the registry does not know."""
    publish: Literal["merged", "adapter"] = "merged"
    """What to publish to the engines. merged: all weights, with the adapters merged in; adapter: only the adapters,
    which the engine applies to its own copy of the base."""

    @property
    def published_rank(self) -> int:
        """The rank of the adapters that are published to engines; 0 if merged weights are published."""
        return self.rank if self.publish == "adapter" else 0

    def check_rules(self) -> None:
        is_given = "rank" in self.model_fields_set or self.publish == "adapter"
        if not is_given and self.model_dump(exclude_defaults=True):
            raise ValueError("lora needs rank: by default it is 0, which trains the whole model without adapters")
        if self.publish == "adapter" and not 0 < self.rank <= MAX_PUBLISHED_RANK:
            raise ValueError(
                f"lora.publish adapter needs lora.rank from 1 to {MAX_PUBLISHED_RANK} (the largest that vLLM serves), "
                f"not {self.rank}; set lora.rank, or lora.publish merged"
            )


class ProfilerConfig(Strict):
    """torch.profiler over some training steps of some ranks."""

    ranks: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Ranks to profile; empty profiles none."""
    first_step: int = Field(default=1, ge=0)
    """First training step to profile, counted from 0 since the run was opened. Step 0 is not representative, because it
    also compiles and allocates."""
    num_steps: int = Field(default=1, ge=1)
    """Number of training steps to profile; each rank writes them to one Chrome trace."""
    record_shapes: bool = False
    """Record the shapes of operator inputs."""
    profile_memory: bool = False
    """Record memory allocations."""
    with_stack: bool = False
    """Record Python stacks; slow."""
    directory: str = "profile"
    """Directory on the ranks' own hosts where traces are written."""
    memory_snapshot: bool = False
    """Record GPU memory allocations on all ranks, and write a memory snapshot to `directory` if a rank runs out of
    memory."""


class TrainerConfig(Strict):
    """The training of the policy."""

    strategy: Literal["fsdp", "megatron"] = "fsdp"
    """Training backend: fsdp (torch FSDP2) or megatron (Megatron-Core)."""
    num_ranks: int = Field(default=1, ge=1)
    """Number of trainer ranks, normally one per GPU. `lockstep run` starts them on this host if no --trainer address is
    given. A trainer given by address must have been started with this number."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of the forward and backward passes; auto is bfloat16 on GPU and float32 on CPU. Master weights are
    always float32."""
    gradient_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass instead of storing them."""
    max_tokens_per_microbatch: int = Field(default=16384, ge=1)
    """Maximum number of tokens in one micro-batch of packed sequences on one rank. It must be at least the length of
    the longest possible sequence. For the few models that strategy fsdp computes as padded rows (docs/models.md),
    padding counts."""
    num_minibatches: int = Field(default=1, ge=1)
    """Number of mini-batches per batch. Each is an equal share of the prompt groups and one optimizer update."""
    num_epochs: int = Field(default=1, ge=1)
    """Number of passes over the mini-batches of a batch (verl ppo_epochs, TRL num_iterations, SkyRL
    update_epochs_per_batch). The comparison with the engine's log-probabilities comes before the first update."""
    streaming: Annotated[Literal["auto", "off"], _IS_WORD] = "auto"
    """auto: send prompt groups to the trainer in blocks while others are still generated, wherever the result is the
    same (docs/concepts.md, A step); off: send the batch when it is complete. The weights are the same with both, to the
    bit on CPU."""
    lag: LagConfig = LagConfig()
    """Training on samples of earlier weights."""
    max_logprob_diff: float = Field(default=1.0, gt=0)
    """Fail the step, before any update is applied, if the mean absolute difference between the engine's and the
    trainer's log-probabilities is above this, over a batch, or over its first mini-batch if loss.old_logprobs is not
    recompute. The difference is about 0.01 with a bfloat16 engine and larger with rollout.precision fp8; the default is
    far above both, and catches an engine that serves other weights."""
    collective_timeout_s: Seconds = 600.0
    """Seconds after which a collective operation that has not finished fails all ranks of the trainer."""
    loss: LossConfig = LossConfig()
    """Policy loss."""
    optim: OptimConfig = OptimConfig()
    """Optimizer and schedule."""
    moe: RoutingConfig = RoutingConfig()
    """Mixture-of-experts layers, with any strategy."""
    lora: LoraConfig = LoraConfig()
    """LoRA adapters, which both strategies train in the same way."""
    fsdp: FsdpConfig = FsdpConfig()
    """FSDP2 settings, used by strategy fsdp."""
    megatron: MegatronConfig = MegatronConfig()
    """Megatron settings of the policy, used by strategy megatron."""
    profiler: ProfilerConfig = ProfilerConfig()
    """Profiler traces of time and memory."""

    def for_steps(self, num_steps: int | None) -> Self:
        """Returns these settings with fsdp.torch_compile decided for a run of `num_steps`, None if it counts epochs."""
        decided = {"torch_compile": compiles(self.fsdp.torch_compile, num_steps)}
        return self.model_copy(update={"fsdp": self.fsdp.model_copy(update=decided)})

    @property
    def adds_blocks(self) -> bool:
        """Whether a batch can be trained on in blocks whose gradients are added up and applied once."""
        is_sum = self.loss.is_sampled and not self.loss.needs_covariance
        # Auxiliary losses are divided by other counts than the loss. With dropout, a lost stream would use up random
        # numbers.
        is_alone = self.strategy == "fsdp" or not (self.megatron.has_auxiliary_loss or self.lora.dropout)
        return self.num_epochs == 1 and is_sum and is_alone

    @property
    def uses_router_replay(self) -> bool:
        """Whether the policy computes with the engine's routed experts, if the samples have them."""
        is_possible = self.loss.is_sampled and not (
            self.strategy == "megatron" and ignores_routed_experts(self.megatron)
        )
        return self.moe.router_replay != "off" and is_possible

    def check_rules(self) -> None:
        check_lag(self.lag, self.loss, self.num_minibatches)
        if self.moe.router_replay == "on":
            if not self.loss.is_sampled:
                raise ValueError(
                    f"moe.router_replay on needs sampled tokens, and loss.kind {self.loss.kind} has none: leave it out"
                )
            if self.strategy == "megatron" and (setting := ignores_routed_experts(self.megatron)):
                raise ValueError(
                    f"moe.router_replay on: with {setting} Megatron's router ignores routed experts; leave that out, "
                    "or set moe.router_replay to off"
                )
        if self.strategy == "megatron" and self.megatron.use_mbridge and self.lora.rank:
            raise ValueError(
                "megatron.use_mbridge: mbridge does not join the parts of adapters; leave it out, or set lora.rank to 0"
            )
        if self.strategy == "megatron" and self.megatron.fp8 != "none":
            self._check_float8(f"megatron.fp8 {self.megatron.fp8}")
        if self.optim.kind == "muon" and self.strategy == "megatron":
            raise ValueError("optim.kind muon needs strategy fsdp: set strategy fsdp, or optim.kind adamw")
        if self.lora.dropout and self.strategy != "megatron":
            raise ValueError("lora.dropout is above 0: it needs strategy megatron")

    def _check_float8(self, key: str) -> None:
        if self.compute_dtype == "float32":
            raise ValueError(
                f"{key} with compute_dtype float32: float8 needs bfloat16 beside it; set compute_dtype auto"
            )
        if self.lora.rank:
            raise ValueError(
                f"{key} with lora.rank {self.lora.rank}: adapters on a base in float8 were not compared with those on "
                "one in bfloat16; set lora.rank 0, or megatron.fp8 none"
            )


def require_used(section: Strict, strategy: str, *, key: str) -> None:
    """Raises ValueError if the model's section at `key` sets a key that its `strategy` does not read."""
    other = "fsdp" if strategy == "megatron" else "megatron"
    value: object = section.model_dump(include={other}, exclude_defaults=True).get(other)
    path = f"{key}.{other}"
    while isinstance(value, dict) and value:
        name, value = next(iter(cast(dict[str, object], value).items()))
        path += f".{name}"
    if path != f"{key}.{other}":
        raise ValueError(f"{path} is not used by strategy {strategy}: set {key}.strategy={other}, or leave it out")


class RoleConfig(Strict):
    """A model other than the policy. Keys that are null are taken from `trainer`."""

    deployment: Literal["shared", "own"] = "shared"
    """shared: run on the policy's ranks; own: run on a trainer service of its own."""
    model: Annotated[str | None, AT_HOME] = None
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

    def check_rules(self) -> None:
        if self.deployment == "shared" and self.num_ranks is not None:
            raise ValueError("num_ranks is only for deployment: own; set that, or leave num_ranks out")

    def settings(self, trainer: TrainerConfig) -> TrainerConfig:
        names = ("strategy", "num_ranks", "max_tokens_per_microbatch", "fsdp")
        own = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        # Converted weights are those of one model: the policy's, which a role without a model of its own has too.
        inherited = "" if self.model else trainer.megatron.dist_checkpointing_path
        path = (self.megatron.dist_checkpointing_path if self.megatron else "") or inherited
        own["megatron"] = (self.megatron or trainer.megatron).model_copy(update={"dist_checkpointing_path": path})
        # Adapters, a lag and router replay are the policy's only.
        only = {"lora": LoraConfig(), "lag": LagConfig(), "moe": RoutingConfig()}
        return trainer.model_copy(update=only | own)


class ReferenceConfig(RoleConfig):
    """The frozen reference model of the KL penalties in the loss and in the reward."""

    def settings(self, trainer: TrainerConfig) -> TrainerConfig:
        # It computes log-probabilities only, of whole batches.
        return super().settings(trainer).model_copy(update={"num_minibatches": 1})


class TeacherConfig(ReferenceConfig):
    """The frozen model that the policy is distilled from. Its tokenizer must be the policy's."""

    model: Annotated[str | None, AT_HOME] = None
    """Path of the model on its trainer's host, or a model on the Hugging Face Hub, as in `model`; required."""

    def check_rules(self) -> None:
        super().check_rules()
        if self.model is None:
            raise ValueError("model: name the teacher's model; a policy learns nothing from the weights it began with")


class CriticSettings(TrainerConfig):
    """The settings for the ranks of a critic."""

    value_loss: ValueLossConfig = ValueLossConfig()
    """Loss of the critic."""


class CriticConfig(RoleConfig):
    """The value model for advantage.kind gae: the model's body with a scalar head, trained on returns."""

    warmup_steps: int = Field(default=0, ge=0)
    """Number of batches that only the critic is trained on, before the first step. A run that is stopped during these
    begins with the first of them again."""
    num_minibatches: int | None = Field(default=None, ge=1)
    """Mini-batches per batch, each an optimizer update; null uses trainer.num_minibatches."""
    num_epochs: int | None = Field(default=None, ge=1)
    """Passes over the mini-batches of a batch; null uses trainer.num_epochs."""
    optim: OptimConfig = OptimConfig()
    """Optimizer and schedule of the critic."""
    loss: ValueLossConfig = ValueLossConfig()
    """Loss of the critic."""

    def settings(self, trainer: TrainerConfig) -> CriticSettings:
        counts = {"num_minibatches": self.num_minibatches, "num_epochs": self.num_epochs}
        own = {name: count for name, count in counts.items() if count is not None}
        common = super().settings(trainer).model_copy(update={"optim": self.optim, **own})
        return CriticSettings(**dict(common), value_loss=self.loss)


def tensor_settings(config: TrainerConfig) -> dict[str, object]:
    """Returns the values by config key without which a checkpoint has other tensors."""
    adapters = {"lora.alpha": config.lora.alpha} if config.lora.rank else {}
    return {"strategy": config.strategy, "optim.kind": config.optim.kind, "lora.rank": config.lora.rank, **adapters}


def require_made_with(saved: Mapping[str, object], now: Mapping[str, object], checkpoint_path: str) -> None:
    """Raises PreconditionFailed if a checkpoint was saved with other values; `now` need not have all of them."""
    different = [key for key in saved if saved[key] != now.get(key, saved[key])]
    if files := [key.removeprefix("model/") for key in different if key.startswith("model/")]:
        raise PreconditionFailed(
            f"checkpoint {checkpoint_path} was saved with another {' and '.join(files)} of the model: set model to the "
            "one that it was trained from (config.json in the run's directory names it), or start from an export of "
            "the checkpoint (lockstep export)",
            field="model",
        )
    if different:
        were, are = (", ".join(f"{key} {values[key]}" for key in different) for values in (saved, now))
        raise PreconditionFailed(
            f"checkpoint {checkpoint_path} was saved with {were}, and the config has {are}: it would be another "
            "model or optimizer; set them as they were, or start from an export of the checkpoint (lockstep export)",
            field=different[0],
        )
