"""Estimates for `lockstep plan`: device memory of a run, in bytes per rank, and the size of one publication.

Weights, gradients and optimizer state are exact, except for the padding of Megatron's buffers and for
optimizer_offload_fraction, which Megatron rounds to whole weights. Activations follow
Korthikanti et al. 2022 (arXiv 2205.05198, sections 4.1 and 4.2.2; with flash attention there is no 5as/h term), with
this model's widths in every term: grouped-query attention, a gated MLP, and num_experts_per_tok MLPs with experts.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from services.common.config.run import Config
from services.common.config.trainer.section import TrainerConfig
from services.common.errors import InvalidInput
from services.common.families.architecture import Architecture, Shape
from services.common.families.record import Weight
from services.common.megatron.layout import Layout
from services.common.megatron.lora import FUSED, PARTS, lora_layer

_GRADIENT, _MASTER, _MOMENTS = 4, 4, 8  # bytes per parameter, float32
_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
_ACTIVATION = 2  # bfloat16
_ALIGN = 16  # alignment of tensors in a bucket, in bytes, as in services.common.weights.plan


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank. `activations` is for one micro-batch; up to `in_flight` of them are held at a time."""

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int = 0
    in_flight: float = 1
    reference: int = 0
    offloads: frozenset[str] = frozenset()

    @property
    def peak(self) -> int:
        """The larger of the backward pass (without offloaded optimizer state) and the update (without activations)."""
        backward = int(self.activations * self.in_flight) + (0 if "optimizer" in self.offloads else self.optimizer)
        return self.weights + self.gradients + self.reference + max(backward, self.optimizer)

    @property
    def idle(self) -> int:
        """Bytes that stay on the device between updates."""
        parts = {"params": self.weights, "grads": self.gradients, "optimizer": self.optimizer}
        return self.reference + sum(size for name, size in parts.items() if name not in self.offloads)


def weight_bytes(trainer: TrainerConfig) -> int:
    """Returns the bytes of one weight in the compute dtype, in which it is also published; auto counts as bfloat16."""
    return 4 if trainer.compute_dtype == "float32" else 2


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter of the gradient, master weight and Adam moments, with strategy megatron."""

    gradient: int
    master: int
    moments: int
    device_share: float
    """Fraction of the parameters whose master weights and moments are on the device; the CPU updates the others."""

    @classmethod
    def of(cls, trainer: TrainerConfig) -> "StateBytes":
        """Derives the sizes from the trainer's dtype, `ddp_config` and `optimizer_config_kwargs`.

        Raises:
            InvalidInput: `optimizer_config_kwargs` has an unknown dtype.
        """
        held, megatron, options = weight_bytes(trainer), trainer.megatron, trainer.megatron.optimizer_config_kwargs
        gradient = _GRADIENT if megatron.ddp_config.get("grad_reduce_in_fp32", True) else held
        master, moments = _MASTER if held == 2 else 0, _MOMENTS
        if options.get("use_precision_aware_optimizer"):
            moments = _num_bytes(options, "exp_avg_dtype") + _num_bytes(options, "exp_avg_sq_dtype")
            whole = _num_bytes(options, "main_params_dtype")
            # With bfloat16 weights, only the missing low 16 bits of the float32 value are stored.
            master = min(master, whole if megatron.fully_reshardable else 2)
        offloaded = options.get("optimizer_offload_fraction", 0) if options.get("optimizer_cpu_offload") else 0
        return cls(gradient, master, moments, 1 - offloaded)


def _num_bytes(options: Mapping[str, object], name: str) -> int:
    dtype, field = str(options.get(name, "fp32")).lower(), f"trainer.megatron.optimizer_config_kwargs.{name}"
    if dtype not in _BYTES:
        raise InvalidInput(f"{field}: {dtype!r} is not one of {', '.join(_BYTES)}", field=field)
    return _BYTES[dtype]


def rank_memory(config: Config, model: Architecture) -> dict[str, Memory]:
    """Returns the memory of each kind of rank by its name: of each pipeline stage, or with strategy fsdp of all."""
    if config.trainer.strategy == "fsdp":
        return {"all": fsdp_memory(config, model)}
    layout = Layout.of(config.trainer.megatron, config.trainer.num_ranks)
    return {f"pp {pp}": stage_memory(config, model, pp) for pp in range(layout.pp)}


def stage_memory(config: Config, model: Architecture, pp: int) -> Memory:
    """Returns the memory of a rank in pipeline stage `pp` with strategy megatron."""
    trainer, megatron = config.trainer, config.trainer.megatron
    layout = Layout.of(megatron, trainer.num_ranks)
    dense, expert = stage_parameters(model, layout, pp)
    trained = (adapter_parameters(trainer, model, layout), 0) if trainer.lora.rank else (dense, expert)
    held, state = weight_bytes(trainer), StateBytes.of(trainer)
    per_parameter = (state.master + state.moments) * state.device_share
    shards = (layout.dp * layout.cp, layout.edp) if megatron.use_distributed_optimizer else (1, 1)
    return Memory(
        parameters=dense + expert,
        weights=held * (dense + expert + (trained[0] if trainer.lora.rank else 0)),
        gradients=state.gradient * sum(trained),
        optimizer=sum(math.ceil(per_parameter * count / ranks) for count, ranks in zip(trained, shards, strict=True)),
        activations=stage_activations(trainer, model, layout),
        in_flight=_in_flight(layout, pp),
        reference=_reference(config, model),
        offloads=megatron.offloads,
    )


def fsdp_memory(config: Config, model: Architecture) -> Memory:
    """Returns the memory of any rank with strategy fsdp, without activations. Weights are float32; all is sharded.

    Unless `reduce_each_microbatch` is set, gradients are unsharded until the last micro-batch. They are freed after the
    update.
    """
    fsdp, count = config.trainer.fsdp, -(-model.num_parameters // config.trainer.num_ranks)
    offloads = frozenset(("params", "grads", "optimizer") if fsdp.cpu_offload else ("grads",))
    gradients = _GRADIENT * (count if fsdp.reduce_each_microbatch else model.num_parameters)
    memory = Memory(count, _MASTER * count, gradients, _MOMENTS * count, offloads=offloads)
    return replace(memory, reference=_MASTER * count) if "reference" in config.models else memory


def stage_parameters(model: Architecture, layout: Layout, pp: int) -> tuple[int, int]:
    """Returns the numbers of dense and of expert parameters on a rank in stage `pp`."""
    num_layers = model.num_layers // layout.pp
    dense = num_layers * model.layer_parameters(layout.tp)
    is_first, is_last = pp == 0, pp == layout.pp - 1
    # If the output layer is tied to the embedding, the last stage needs a copy unless it is also the first stage.
    num_embeddings = is_first + (is_last and not (is_first and model.tie_word_embeddings))
    dense += num_embeddings * model.embedding_parameters(layout.tp) + is_last * model.hidden_size
    return dense, num_layers * model.num_experts // layout.ep * model.expert_parameters(layout.etp)


def _in_flight(layout: Layout, pp: int) -> float:
    """Returns the most micro-batches that a stage holds between forward and backward in 1F1B (interleaved with VPP)."""
    if layout.vpp == 1:
        return layout.pp - pp
    return (2 * (layout.pp - pp - 1) + (layout.vpp - 1) * layout.pp + 1) / layout.vpp


def stage_activations(trainer: TrainerConfig, model: Architecture, layout: Layout) -> int:
    """Returns the bytes that a micro-batch of max_tokens_per_microbatch keeps on a rank for the backward pass."""
    megatron, tokens = trainer.megatron, trainer.max_tokens_per_microbatch // layout.cp
    num_layers = model.num_layers // layout.pp
    whole, inputs = _layer_activations(model, layout, megatron.has_sequence_parallel)
    if not trainer.gradient_checkpointing or megatron.recompute_granularity == "selective":
        return tokens * num_layers * whole
    every = megatron.recompute_num_layers
    if megatron.recompute_method == "block":
        recomputed = min(every * layout.vpp, num_layers)
        return tokens * (recomputed * inputs + (num_layers - recomputed) * whole)
    return tokens * -(-num_layers // every) * inputs


def _layer_activations(model: Architecture, layout: Layout, has_sequence_parallel: bool) -> tuple[int, int]:
    """Returns the bytes per token of everything a layer keeps for backward, and of its input alone."""
    size = _ACTIVATION * model.hidden_size
    # Inputs of the two norms, of q k v and of the MLP; only sequence parallelism shards them.
    common = 4 * size // (layout.tp if has_sequence_parallel else 1)
    # q, k, v and the input of the output projection.
    attention = _ACTIVATION * (2 * model.query_size + 2 * model.key_value_size)
    # Gate, up and their product.
    feed_forward = 3 * _ACTIVATION * (model.intermediate_size + model.shared_expert_intermediate_size)
    # The same for each chosen expert, and the token's copies sent to and returned by all ranks of the expert.
    experts = model.num_experts_per_tok * (3 * _ACTIVATION * model.moe_intermediate_size + 2 * size * layout.etp)
    inputs = size // (layout.tp if has_sequence_parallel else 1)
    return common + (attention + feed_forward + experts) // layout.tp, inputs


def adapter_parameters(trainer: TrainerConfig, model: Architecture, layout: Layout) -> int:
    """Returns the adapter parameters on a rank. A matrix sharded by rows has its second factor (B) sharded, one
    sharded by columns its first (A).
    """
    total = 0
    for weight, parts in _lora_targets(trainer, model):
        by_columns = weight.cut == "columns"
        outputs, inputs = sum(rows for rows, _ in parts), parts[0][1]
        cut, whole = (inputs, outputs) if by_columns else (outputs, inputs)
        total += trainer.lora.rank * (whole + cut // layout.tp)
    return total * (model.num_layers // layout.pp)


def publication(config: Config, model: Architecture) -> tuple[int, int]:
    """Returns the bytes and buckets of one publication: all weights, or each adapter's two factors."""
    trainer, sizes = config.trainer, model.tensor_sizes()
    if rank := trainer.lora.published_rank:
        layer = [shape for weight, parts in _lora_targets(trainer, model) for shape in _adapted(weight, parts)]
        sizes = (rank * n for _ in range(model.num_layers) for rows, cols in layer for n in (cols, rows))
    return _cut((size * weight_bytes(trainer) for size in sizes), config.weights.bucket_bytes)


def _lora_targets(trainer: TrainerConfig, model: Architecture) -> Iterator[tuple[Weight, list[Shape]]]:
    """Yields the matrix of each adapter and the shapes of its parts that share the adapter's first factor."""
    for weight in model.layer:
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


def _reference(config: Config, model: Architecture) -> int:
    """Returns the bytes of a reference on the policy's ranks; with adapters it is the base model and adds nothing."""
    reference = config.models.get("reference")
    if reference is None or config.reference.deployment == "own" or "params" in reference.megatron.offloads:
        return 0
    layout = Layout.of(reference.megatron, reference.num_ranks)
    return weight_bytes(reference) * max(sum(stage_parameters(model, layout, pp)) for pp in range(layout.pp))
