"""Estimates for `lockstep plan`: memory of a trainer's rank by phase, in bytes, and the size of one publication.

Weights, gradients and optimizer state are exact, except for the padding of Megatron's buffers and for
optimizer_offload_fraction, which Megatron rounds to whole weights. services.coordinator.planning.activations estimates
the rest. `is_gpu` says whether the ranks compute on GPUs: the dtype auto, the kernels and the process's own memory
depend on it.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from services.common.config.layout import Layout, layout_of
from services.common.config.load import AnyConfig
from services.common.config.operation import SHARED_UTILIZATION
from services.common.config.run import Config
from services.common.config.sft import SftConfig
from services.common.config.trainer import TrainerConfig
from services.common.errors import InvalidInput
from services.common.families.architecture import Architecture, Shape
from services.common.families.layers import Weight
from services.common.families.registry import FUSED, PARTS, lora_layer
from services.coordinator.planning.activations import (
    MeasuredModel,
    MicrobatchMemory,
    Model,
    gathered_parameters,
    in_flight,
    microbatch_memory,
    orthogonalized_parameters,
    stage_parameters,
    weight_bytes,
)
from services.coordinator.planning.frozen import frozen_models, is_shared, sized_model

_GRADIENT, _MASTER, _MOMENTS = 4, 4, 8  # bytes per parameter, float32
_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
_BUCKETS_IN_FLIGHT = 3  # one that is packed, and two on their way
FSDP_BASE, MEGATRON_BASE = 400 << 20, 440 << 20
"""Resident bytes of a rank on CPU that has imported torch, transformers and, for the second, Megatron-Core, and has a
process group, but no model. Measured by benchmarks/memory.py; file pages of libraries are included."""
_NUM_BUFFERS = 2  # of a pair (services.common.weights.pairs)
_DEFAULT_UTILIZATION = 0.92  # vLLM's own, of an engine that has its GPU for itself
_FLOAT8_COPIES = 2  # of a weight in float8, one for each order of its rows and columns
_WHOLE = Layout(1)
_ALIGN = 16  # alignment of tensors in a bucket, in bytes, as in services.common.weights.plan


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank. `activations` is for one micro-batch, of which up to `in_flight` are held."""

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    microbatch: MicrobatchMemory
    in_flight: float = 1
    reference: int = 0
    teacher: int = 0
    teacher_forward: int = 0
    """What a forward pass of the teacher takes besides its weights."""
    gathered: int = 0
    """Weights that exist only while layers compute: with strategy fsdp unsharded ones, with megatron.fp8 those in
    float8."""
    publication: int = 0
    """Gathered weights and buckets of a publication."""
    base: int = 0
    """Memory of the process without a model: on CPU torch and the other libraries; on GPU it is not counted."""
    offloads: frozenset[str] = frozenset()
    gradient_copies: int = 0
    """Float32 copies of bfloat16 gradients, which exist from an optimizer step to the next backward pass."""
    critic: "Memory | None" = None
    """Of a critic on the same rank, whose update is a phase of its own."""

    @property
    def activations(self) -> int:
        return self.microbatch.activations

    @property
    def critic_state(self) -> int:
        return self.critic.idle if self.critic else 0

    @property
    def phases(self) -> dict[str, int]:
        """Returns the peak of each phase of a step: forward without gradients, backward, optimizer, publication, and
        the whole update of a critic."""
        always = self.base + self.weights + self.reference + self.teacher + self.critic_state
        state = 0 if "optimizer" in self.offloads else self.optimizer
        gradients = 0 if "grads" in self.offloads else self.gradients
        kept = int(self.microbatch.activations * self.in_flight) + self.microbatch.holes
        # Later phases find the heap that the backward pass has left.
        least = always + state + self.gradients + kept if self.microbatch.is_in_heap else 0
        copies, forward = self.gradient_copies, max(self.gathered + self.microbatch.forward, self.teacher_forward)
        phases = {
            "forward": always + state + gradients + copies + forward,
            "backward": always + state + self.gradients + self.gathered + kept + self.microbatch.backward,
            "optimizer": always + self.optimizer + self.gradients + copies,
            "publication": always + state + gradients + copies + self.publication,
        }
        if self.critic:
            phases["critic"] = self.idle - self.critic_state + self.critic.peak
        return {name: max(least, num_bytes) for name, num_bytes in phases.items()}

    @property
    def peak(self) -> int:
        return max(self.phases.values())

    @property
    def idle(self) -> int:
        """Returns the bytes that stay on the device between updates."""
        parts = {"params": self.weights, "grads": self.gradients, "optimizer": self.optimizer}
        kept = sum(size for name, size in parts.items() if name not in self.offloads)
        return self.base + self.reference + self.teacher + self.critic_state + self.gradient_copies + kept


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter of the gradient, master weight and Adam moments, with strategy megatron."""

    gradient: int
    gradient_copy: int
    """Of the float32 gradient that the optimizer makes from a bfloat16 one, unless it is precision-aware."""
    master: int
    moments: int
    device_share: float
    """Fraction of the parameters whose master weights and moments are on the device; the CPU updates the others."""

    @classmethod
    def of(cls, trainer: TrainerConfig, *, is_gpu: bool) -> "StateBytes":
        """Derives the sizes from the trainer's dtype, `ddp_config` and `optimizer_config_kwargs`.

        Raises:
            InvalidInput: `optimizer_config_kwargs` has an unknown dtype.
        """
        weight, megatron = weight_bytes(trainer, is_gpu=is_gpu), trainer.megatron
        options = megatron.optimizer_config_kwargs
        gradient = _GRADIENT if megatron.ddp_config.get("grad_reduce_in_fp32", True) else weight
        master, moments = _MASTER if weight == 2 else 0, _MOMENTS
        copy = 0 if gradient == _GRADIENT else _GRADIENT
        if options.get("use_precision_aware_optimizer"):
            copy = 0
            moments = _num_bytes(options, "exp_avg_dtype") + _num_bytes(options, "exp_avg_sq_dtype")
            whole = _num_bytes(options, "main_params_dtype")
            # With bfloat16 weights, only the missing low 16 bits of the float32 value are stored.
            master = min(master, whole if megatron.fully_reshardable else 2)
        offloaded = options.get("optimizer_offload_fraction", 0) if options.get("optimizer_cpu_offload") else 0
        return cls(gradient, copy, master, moments, 1 - offloaded)


def _num_bytes(options: Mapping[str, object], name: str) -> int:
    dtype, field = str(options.get(name, "fp32")).lower(), f"trainer.megatron.optimizer_config_kwargs.{name}"
    if dtype not in _BYTES:
        raise InvalidInput(f"{field}: {dtype!r} is not one of {', '.join(_BYTES)}", field=field)
    return _BYTES[dtype]


def rank_memory(config: AnyConfig, model: Model, *, is_gpu: bool) -> dict[str, Memory]:
    if isinstance(model, MeasuredModel) or config.trainer.strategy == "fsdp":
        return {"all": fsdp_memory(config, model, is_gpu=is_gpu)}
    stages = range(layout_of(config.trainer).pp)
    return {f"pp {pp}": stage_memory(config, model, pp, is_gpu=is_gpu) for pp in stages}


def critic_memory(config: AnyConfig, policy: Model, *, is_gpu: bool) -> Memory | None:
    """Returns the memory of the critic on its rank that has most, or None if the run has none. It counts as a policy
    with an output layer in place of its head, which is a little too much. `policy` is the model of one that names none.

    Raises:
        NotFound: The critic's model has no config.json on this host.
    """
    sized = sized_model(config, "critic", policy)
    if sized is None:
        return None
    settings, model = sized
    ranks = rank_memory(config.model_copy(update={"trainer": settings, "critic": None}), model, is_gpu=is_gpu)
    most = max(ranks.values(), key=lambda memory: memory.peak)
    return replace(most, base=0, reference=0, teacher=0, teacher_forward=0, publication=0)


def stage_memory(config: AnyConfig, model: Architecture, pp: int, *, is_gpu: bool) -> Memory:
    """Returns the memory of a rank in pipeline stage `pp` with strategy megatron."""
    trainer, megatron, layout = config.trainer, config.trainer.megatron, layout_of(config.trainer)
    dense, expert = stage_parameters(model, layout, pp)
    trained = (adapter_parameters(trainer, model, layout, pp), 0) if trainer.lora.rank else (dense, expert)
    weight, state = weight_bytes(trainer, is_gpu=is_gpu), StateBytes.of(trainer, is_gpu=is_gpu)
    shards = (layout.dp * layout.cp, layout.edp) if megatron.use_distributed_optimizer else (1, 1)

    def sharded(per_parameter: float) -> int:
        return sum(math.ceil(per_parameter * count / ranks) for count, ranks in zip(trained, shards, strict=True))

    return Memory(
        parameters=dense + expert,
        weights=weight * (dense + expert + (trained[0] if trainer.lora.rank else 0)),
        gradients=state.gradient * sum(trained),
        optimizer=sharded((state.master + state.moments) * state.device_share),
        microbatch=microbatch_memory(config, model, layout, pp, is_gpu=is_gpu),
        in_flight=in_flight(layout, pp),
        **_frozen(config, model, is_gpu=is_gpu),
        critic=critic_memory(config, model, is_gpu=is_gpu) if is_shared(config, "critic") else None,
        gathered=0 if megatron.fp8 == "none" else _FLOAT8_COPIES * product_parameters(model, layout, pp),
        publication=_in_publication(config, model, is_gpu=is_gpu),
        base=0 if is_gpu else MEGATRON_BASE,
        offloads=megatron.offloads,
        gradient_copies=sharded(state.gradient_copy),
    )


def fsdp_memory(config: AnyConfig, model: Model, *, is_gpu: bool) -> Memory:
    """Returns the memory of any rank with strategy fsdp. Weights are float32, or with adapters those, and everything is
    sharded.

    Unless `reduce_each_microbatch` is set, gradients are unsharded until the last micro-batch. They are freed after the
    update.
    """
    trainer, fsdp, ranks = config.trainer, config.trainer.fsdp, config.trainer.num_ranks
    count, weight = -(-model.num_parameters // ranks), weight_bytes(trainer, is_gpu=is_gpu)
    trained = trained_parameters(trainer, model)
    # A vision tower is float32 as well, and without gradient.
    own = -(-trained // ranks)
    frozen = weight * count if trainer.lora.rank else _MASTER * (count - own)
    return Memory(
        parameters=count,
        weights=frozen + _MASTER * own,
        gradients=_GRADIENT * (own if fsdp.reduce_each_microbatch else trained),
        optimizer=_MOMENTS * own - _MOMENTS // 2 * (orthogonalized_parameters(trainer, model, trained) // ranks),
        microbatch=microbatch_memory(config, model, layout_of(trainer), 0, is_gpu=is_gpu),
        **_frozen(config, model, is_gpu=is_gpu),
        critic=critic_memory(config, model, is_gpu=is_gpu) if is_shared(config, "critic") else None,
        gathered=weight * gathered_parameters(trainer, model),
        publication=_in_publication(config, model, is_gpu=is_gpu),
        base=0 if is_gpu else FSDP_BASE,
        offloads=frozenset(("params", "grads", "optimizer") if fsdp.cpu_offload else ("grads",)),
    )


def trained_parameters(trainer: TrainerConfig, model: Model) -> int:
    """Returns how many parameters of the whole model are trained: those of its adapters, if it has some."""
    if isinstance(model, MeasuredModel):
        return sum(model.adapter_sizes) if trainer.lora.rank else model.num_trained
    return adapter_parameters(trainer, model, _WHOLE, 0) if trainer.lora.rank else model.num_parameters


def product_parameters(model: Architecture, layout: Layout, pp: int) -> int:
    """Returns how many numbers the matrices of layers have that float8 is for, on a rank in stage `pp`."""
    total = 0
    for weight in (
        weight for number in itertools.chain(*layout.layers(model.num_layers, pp)) for weight in model.layer(number)
    ):
        if weight.is_linear:
            own = layout.etp if weight.is_expert else layout.tp
            copies = model.num_experts // layout.ep if weight.is_expert and not weight.is_stacked else 1
            total += copies * model.weight_parameters(weight, own)
    return total


def adapter_parameters(trainer: TrainerConfig, model: Architecture, layout: Layout, pp: int) -> int:
    """Returns the adapter parameters on a rank in stage `pp`.

    A matrix sharded by rows has its second factor (B) sharded, one sharded by columns its first (A).
    """
    total = 0
    for weight, parts in _lora_targets(trainer, model, itertools.chain(*layout.layers(model.num_layers, pp))):
        by_columns = weight.cut == "columns"
        outputs, inputs = sum(rows for rows, _ in parts), parts[0][1]
        cut, whole = (inputs, outputs) if by_columns else (outputs, inputs)
        total += trainer.lora.rank * (whole + cut // (1 if weight.cut == "whole" else layout.tp))
    return total


def publication(config: AnyConfig, model: Model, *, is_gpu: bool) -> tuple[int, int]:
    """Returns the bytes and buckets of one publication: all weights, or each adapter's two factors."""
    trainer, sizes = config.trainer, model.tensor_sizes()
    if isinstance(model, MeasuredModel):
        sizes = model.adapter_sizes if trainer.lora.published_rank else sizes
    elif rank := trainer.lora.published_rank:
        targets = _lora_targets(trainer, model, range(model.num_layers))
        shapes = (shape for weight, parts in targets for shape in _adapted(weight, parts))
        sizes = (rank * n for rows, cols in shapes for n in (cols, rows))
    weight = weight_bytes(trainer, is_gpu=is_gpu)
    return _cut((size * weight for size in sizes), config.bucket_bytes)


def _lora_targets(
    trainer: TrainerConfig, model: Architecture, layers: Iterable[int]
) -> Iterator[tuple[Weight, list[Shape]]]:
    """Yields the matrix of each adapter and the shapes of its parts that share the adapter's first factor."""
    for weight in (weight for number in layers for weight in model.layer(number)):
        if weight.is_expert or (layer := lora_layer(weight.parameter)) is None:  # experts get no adapters
            continue
        shapes = dict(zip(FUSED[layer], model.part_shapes(weight), strict=True))
        for target in PARTS[trainer.lora.kind][layer]:
            if not trainer.lora.target_modules or target in trainer.lora.target_modules:
                yield weight, [shapes[target]] if target in shapes else list(shapes.values())


def _adapted(weight: Weight, parts: Sequence[Shape]) -> Sequence[Shape]:
    """Returns the shapes of the checkpoint's matrices; it may stack the parts in one."""
    return [(sum(rows for rows, _ in parts), parts[0][1])] if weight.is_fused else parts


def _cut(sizes: Iterable[int], bucket_bytes: int) -> tuple[int, int]:
    total = buckets = offset = 0
    for size in sizes:
        total += size
        if offset and offset + size > bucket_bytes:
            buckets, offset = buckets + 1, 0
        offset += size + -size % _ALIGN
    return total, buckets + (offset > 0)


def _in_publication(config: AnyConfig, model: Model, *, is_gpu: bool) -> int:
    """Returns the bytes of the buckets in flight, up to three, on a rank that sends."""
    if isinstance(config, SftConfig):
        return 0
    num_bytes, _ = publication(config, model, is_gpu=is_gpu)
    return min(num_bytes, _BUCKETS_IN_FLIGHT * config.bucket_bytes)


def _frozen(config: AnyConfig, model: Model, *, is_gpu: bool) -> dict[str, int]:
    """Returns the parts of a Memory that are of frozen models on the policy's ranks.

    A reference that is the base model under the policy's adapters adds nothing.
    """
    shared = {one.name: one for one in frozen_models(config, model, is_gpu=is_gpu) if one.is_shared}
    parts = {name: one.weights for name, one in shared.items()}
    return parts | ({"teacher_forward": shared["teacher"].forward} if "teacher" in shared else {})


@dataclass(frozen=True)
class Phase:
    """Bytes of one GPU in one phase. `engine` does not count the KV cache."""

    name: str
    trainer: int
    engine: int

    @property
    def total(self) -> int:
        return self.trainer + self.engine


def colocated_phases(config: Config, model: Model, ranks: Collection[Memory]) -> list[Phase]:
    """Returns the phases of a step; `ranks` has the memory of each kind of rank, and the largest counts."""
    stays, engine = config.is_side_by_side, engine_weights(config, model)
    kept = max(rank.idle if stays else rank.weights for rank in ranks)
    trains = max(size for rank in ranks for name, size in rank.phases.items() if name != "publication")
    return [
        Phase("generate", kept if stays else 0, engine),
        Phase("train", trains, engine if stays else 0),
        Phase("publish", kept + _NUM_BUFFERS * buffer_bytes(config, model), engine),
    ]


def host_bytes(ranks: Collection[Memory]) -> int:
    """Returns the pinned host memory of a rank while the engine has the GPU; gradients are dropped."""
    policy = max(rank.weights + rank.optimizer + rank.reference + rank.teacher for rank in ranks)
    return policy + max(rank.critic.weights + rank.critic.optimizer if rank.critic else 0 for rank in ranks)


def buffer_bytes(config: Config, model: Model) -> int:
    """Returns the bytes of a publication's largest bucket."""
    sizes = [size * weight_bytes(config.trainer, is_gpu=True) for size in model.tensor_sizes()]
    return min(sum(sizes), max(config.bucket_bytes, *sizes))


def engine_weights(config: Config, model: Model) -> int:
    """Returns the bytes of an engine worker's weights; scales of quantized ones are not counted."""
    size, quantized = 4 if config.rollout.dtype == "float32" else 2, 0
    if config.rollout.precision == "fp8":
        sizes = model.layer_sizes if isinstance(model, MeasuredModel) else [product_parameters(model, _WHOLE, 0)]
        quantized = sum(sizes)
    return (size * model.num_parameters - (size - 1) * quantized) // _workers_per_copy(config)


def utilization(config: Config) -> float:
    """Returns the share of its GPU that an engine takes, for weights and KV cache."""
    default = SHARED_UTILIZATION if config.placement == "colocated" else _DEFAULT_UTILIZATION
    return float(config.rollout.engine.get("gpu_memory_utilization", default))


def cache_token_bytes(config: Config, model: Model) -> int:
    """Returns the bytes of the KV cache that a token takes on a worker, in bfloat16 or float8.

    Of latent attention it is what keys and values are made of, and every worker has all of it.
    """
    size, tp = (1 if config.rollout.kv_cache_dtype == "fp8" else 2), config.rollout.tensor_parallel_size
    if isinstance(model, Architecture) and model.kv_lora_rank:
        return size * model.num_layers * model.latent_size * tp // _workers_per_copy(config)
    copies = max(1, tp // model.num_key_value_heads)  # of each head, if there are more workers than heads
    return size * 2 * model.num_layers * model.key_value_size * copies // _workers_per_copy(config)


def _workers_per_copy(config: Config) -> int:
    stages = config.rollout.engine.get("pipeline_parallel_size", 1)
    return config.rollout.tensor_parallel_size * (stages if isinstance(stages, int) else 1)
