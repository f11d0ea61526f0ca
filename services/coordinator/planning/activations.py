"""Estimates the bytes that a micro-batch needs on a rank: kept activations, a layer's working memory, and the logits.

On GPU, the activations are those of Korthikanti et al. 2022 (arXiv 2205.05198, sections 4.1 and 4.2.2), with this
model's widths in every term. The 5as/h term is left out, because flash attention keeps no scores. torch.compile keeps
the same tensors. Of a model that the registry does not know, the matrices' own results are counted, which are the same
tensors: attention and experts are matrices, and what a recurrent layer keeps besides is not counted.

On CPU, every operator of a layer keeps its own inputs, which is about twice as much; flash attention keeps no scores
there either. Tensors below 32 MiB are in the heap of glibc, which the process does not give back, and temporary results
leave holes between the tensors that are kept. benchmarks/memory.py compares these estimates with measured peaks.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from pydantic import TypeAdapter

from services.common.config.layout import Layout, data_parallel_size
from services.common.config.load import AnyConfig
from services.common.config.sft import SftConfig
from services.common.config.trainer import TrainerConfig
from services.common.errors import InvalidInput
from services.common.families.architecture import Architecture
from services.common.families.registry import Kind
from services.coordinator.fleet.probes import describe_model


@dataclass(frozen=True)
class MeasuredModel:
    """Sizes of a model that the registry does not know, as the trainer's code builds it, without its weights.

    It is what `services.trainer.probe` says. Lists count numbers (not bytes), in the order of a publication.
    """

    model_type: str
    layout: str
    """packed, or rows if the whole model computes padded samples."""
    attention: str
    num_parameters: int
    num_trained: int
    layer_sizes: tuple[int, ...]
    layer_matrices: int
    """Numbers of the matrices of all layers that are trained, without stacked experts."""
    layer_width: int
    """Numbers that the matrices of a layer read and write for one token, besides hidden states; a mean over layers."""
    widest: int
    """The most numbers that one matrix reads or writes for one token."""
    hidden_size: int
    vocab_size: int
    key_value_size: int
    """The most numbers of keys that a layer caches for one token."""
    num_key_value_heads: int
    """Of the layer with the most numbers of keys."""
    sizes: tuple[int, ...]
    """Of each tensor of the checkpoint."""
    adapter_sizes: tuple[int, ...]

    # As of an Architecture. Layers are counted by `layer_width`.
    num_experts = 0

    @property
    def num_layers(self) -> int:
        return len(self.layer_sizes)

    @property
    def end_parameters(self) -> int:
        """Parameters outside of the layers, with those of a vision tower."""
        return self.num_parameters - sum(self.layer_sizes)

    def tensor_sizes(self) -> Iterator[int]:
        return iter(self.sizes)


Model = Architecture | MeasuredModel
"""Sizes of a model, by which its memory is estimated."""


def measure(directory: str, trainer: TrainerConfig) -> MeasuredModel:
    """Returns the sizes of the model in a directory of this host, for strategy fsdp.

    Raises:
        InvalidInput: The trainer would refuse the model, or torch, with which it is built, is not installed here.
    """
    if find_spec("torch") is None:
        raise InvalidInput(
            f"the memory of {directory} cannot be estimated here: its type is not in the registry, and torch, with "
            "which its parameters are counted, is not installed",
            field="model",
        )
    return TypeAdapter(MeasuredModel).validate_python(describe_model(directory, trainer))


_FLOAT32 = 4
# As services.trainer.updates.logprobs computes the logits: entries at a time, the most that are kept for the backward
# pass, and bytes for each in forward and backward on CPU, where several float32 copies exist at once. On GPU one kernel
# reads the logits and writes their gradients.
_ENTRIES_AT_ONCE = {False: 64 << 20, True: 256 << 20}
_KEPT_ENTRIES = {False: 64 << 20, True: 768 << 20}
_LOGITS_BYTES_CPU = (16, 21)
# For each of a teacher's tokens at each place: the loss and its gradient in float32, and numbers of tokens in int64.
_TOP_K_BYTES = 100
# Larger tensors have a mapping of their own (glibc's DEFAULT_MMAP_THRESHOLD_MAX), which ends with them.
_LARGEST_IN_HEAP = 32 << 20
# Bytes of holes in the heap for each byte that a layer keeps: measured 0.82 with strategy fsdp and 0.84 with megatron.
# With fsdp, a layer that is recomputed leaves a hole of its working memory below the input of the next.
_HOLES = 0.83


@dataclass(frozen=True)
class LayerBytes:
    """Bytes per token of one layer on one rank."""

    kept: int
    """Everything that the layer keeps for the backward pass."""
    inputs: int
    """The layer's input alone, which is kept if the layer is recomputed."""
    working: int
    """Largest intermediate results while the layer computes, without those that it keeps."""


@dataclass(frozen=True)
class MicrobatchMemory:
    """Bytes of the largest micro-batch on one rank."""

    activations: int
    """Results that are kept between forward and backward."""
    forward: int
    """Intermediate results of a forward pass that keeps nothing."""
    backward: int
    """Intermediate results of forward and backward, besides those that are kept."""
    is_in_heap: bool = False
    """Whether the process does not give the activations back after the backward pass, on CPU."""
    holes: int = 0
    """Bytes that intermediate results leave free between activations in the heap. The next micro-batch fills them."""


def microbatch_memory(config: AnyConfig, model: Model, layout: Layout, pp: int, *, is_gpu: bool) -> MicrobatchMemory:
    """Returns the bytes of the largest micro-batch in pipeline stage `pp`, the last of which computes logits."""
    trainer, tokens = config.trainer, microbatch_tokens(config) // layout.cp
    chunks = layout.layers(model.num_layers, pp)
    layers = {n: _layer(trainer, model, layout, n, is_gpu=is_gpu) for chunk in chunks for n in chunk}
    working = max(layer.working for layer in layers.values())
    forward, backward = tokens * working, tokens * working
    if trainer.gradient_checkpointing and not _is_selective(trainer):
        backward += tokens * max(layer.kept for layer in layers.values())
    if pp == layout.pp - 1:
        logits = _logits(trainer, model, layout, tokens, is_gpu=is_gpu)
        forward, backward = max(forward, logits[0]), max(backward, logits[1])
    whole, num_inputs = _layers(trainer, chunks)
    kept_whole, inputs = sum(layers[number].kept for number in whole), next(iter(layers.values())).inputs
    kept = tokens * (kept_whole + num_inputs * inputs)
    # By the width of the feed-forward layer, which has most of the bytes.
    is_measured = isinstance(model, MeasuredModel)
    widest = max(model.widest if is_measured else model.intermediate_size, model.hidden_size) // layout.tp
    if is_gpu or tokens * widest * weight_bytes(trainer, is_gpu=False) >= _LARGEST_IN_HEAP:
        return MicrobatchMemory(kept, forward, backward)
    num_holes = num_inputs if trainer.strategy == "fsdp" else 0
    holes = tokens * int(_HOLES * kept_whole + num_holes * working)
    return MicrobatchMemory(kept, forward, backward, True, holes)


def microbatch_tokens(config: AnyConfig) -> int:
    """Returns the most tokens of a micro-batch: the budget, or all of a mini-batch if its longest samples fit."""
    if isinstance(config, SftConfig):
        samples, longest = config.data.samples_per_step, config.data.max_tokens
    else:
        samples = config.data.prompts_per_step * config.rollout.completions_per_prompt
        longest = config.rollout.max_model_len
    each = -(-samples // config.trainer.num_minibatches // data_parallel_size(config.trainer))
    return min(config.trainer.max_tokens_per_microbatch, each * longest)


def stage_parameters(model: Architecture, layout: Layout, pp: int) -> tuple[int, int]:
    """Returns the numbers of dense and of expert parameters on a rank in stage `pp`."""
    layers = [*itertools.chain(*layout.layers(model.num_layers, pp))]
    dense = sum(model.layer_parameters(number, layout.tp) for number in layers)
    experts = model.num_experts // layout.ep * sum(model.expert_parameters(number, layout.etp) for number in layers)
    is_first, is_last = pp == 0, pp == layout.pp - 1
    # If the output layer is tied to the embedding, the last stage needs a copy unless it is also the first stage.
    num_embeddings = is_first + (is_last and not (is_first and model.tie_word_embeddings))
    dense += num_embeddings * model.embedding_parameters(layout.tp) + is_last * model.hidden_size
    return dense, experts


def gathered_parameters(trainer: TrainerConfig, model: Model) -> int:
    """Returns the parameters that a rank has unsharded at once with strategy fsdp.

    The next layer is gathered while one computes; without resharding all stay gathered.
    """
    if isinstance(model, MeasuredModel):
        ends, layers = model.end_parameters, model.layer_sizes
    else:
        ends = sum(map(model.weight_parameters, model.outside_layers))
        layers = [model.whole_layer_parameters(number) for number in range(model.num_layers)]
    return ends + (2 * max(layers) if trainer.fsdp.reshard_after_forward else sum(layers))


def orthogonalized_parameters(trainer: TrainerConfig, model: Model, trained: int) -> int:
    """Returns how many of a model's `trained` parameters Muon updates: the layers' matrices, but for experts."""
    if trainer.optim.kind != "muon":
        return 0
    if trainer.lora.rank:
        return trained
    if isinstance(model, MeasuredModel):
        return model.layer_matrices
    weights = (weight for _, weight in model.layer_weights())
    return sum(model.weight_parameters(one) for one in weights if one.columns and not one.is_expert)


def in_flight(layout: Layout, pp: int) -> float:
    """Returns the most micro-batches that a stage holds between forward and backward in 1F1B (interleaved with VPP)."""
    if layout.vpp == 1:
        return layout.pp - pp
    return (2 * (layout.pp - pp - 1) + (layout.vpp - 1) * layout.pp + 1) / layout.vpp


def weight_bytes(trainer: TrainerConfig, *, is_gpu: bool) -> int:
    """Returns the bytes of one weight in the compute dtype, in which it is also published."""
    if trainer.compute_dtype == "auto":
        return 2 if is_gpu else _FLOAT32
    return _FLOAT32 if trainer.compute_dtype == "float32" else 2


def _is_selective(trainer: TrainerConfig) -> bool:
    return trainer.strategy == "megatron" and trainer.megatron.recompute_granularity == "selective"


def _layers(trainer: TrainerConfig, chunks: Sequence[range]) -> tuple[list[int], int]:
    """Returns the layers that keep everything, and the number of inputs that are kept to recompute the others."""
    num_layers = sum(map(len, chunks))
    if not trainer.gradient_checkpointing or _is_selective(trainer):
        return [number for chunk in chunks for number in chunk], 0
    if trainer.strategy != "megatron":
        return [], num_layers
    every = trainer.megatron.recompute_num_layers
    if trainer.megatron.recompute_method == "block":
        whole = [number for chunk in chunks for number in chunk[every:]]
        return whole, num_layers - len(whole)
    return [], -(-num_layers // every)


def _layer(trainer: TrainerConfig, model: Model, layout: Layout, number: int, *, is_gpu: bool) -> LayerBytes:
    size = weight_bytes(trainer, is_gpu=is_gpu)
    if isinstance(model, MeasuredModel):
        return _measured_layer(model, size, is_frozen=trainer.lora.rank > 0, is_gpu=is_gpu)
    kind = model.kinds[number]
    # Only sequence parallelism shards the hidden states between the matrices.
    is_sharded = trainer.strategy == "megatron" and trainer.megatron.has_sequence_parallel
    hidden_ranks = layout.tp if is_sharded else 1
    common, attention = _fused(model, size) if is_gpu else _unfused(trainer, model, size)
    cut = attention + _feed_forward(model, layout, kind, size, is_gpu=is_gpu)
    widest = max(_width(model, kind), model.query_size, model.expanded_size)
    working = size * (3 * widest // layout.tp + 3 * model.hidden_size)
    return LayerBytes(common // hidden_ranks + cut // layout.tp, size * model.hidden_size // hidden_ranks, working)


def _measured_layer(model: MeasuredModel, size: int, *, is_frozen: bool, is_gpu: bool) -> LayerBytes:
    """Returns what `_fused` and `_unfused` do for the layers that they know, less up to a fifth: norms of heads."""
    norms = 2 * size if is_gpu else 2 * (_FLOAT32 + (0 if is_frozen else size))
    # Without fused kernels, an activation function and the rotation keep their inputs besides.
    matrices = model.layer_width if is_gpu else model.layer_width * 4 // 3
    working = size * 3 * (model.widest + model.hidden_size)
    return LayerBytes(norms * model.hidden_size + size * matrices, size * model.hidden_size, working)


def _width(model: Architecture, kind: Kind) -> int:
    """Returns the width of what computes every token in a layer's feed-forward network."""
    return model.intermediate_size if kind == "dense" else model.shared_expert_intermediate_size


def _feed_forward(model: Architecture, layout: Layout, kind: Kind, size: int, *, is_gpu: bool) -> int:
    """Returns the bytes per token that a feed-forward network keeps; TP cuts all of it."""
    # Gate, up and their product; plain torch operators keep the gate's activation too.
    num_kept = 3 if is_gpu else 4
    num_bytes = num_kept * size * _width(model, kind)
    if kind == "dense":
        return num_bytes
    # The same for each chosen expert, and the token's copies sent to and returned by all ranks of the expert.
    copies = (num_kept - 1) * size * model.hidden_size * layout.etp
    return num_bytes + model.num_experts_per_tok * (num_kept * size * model.moe_intermediate_size + copies)


def _fused(model: Architecture, size: int) -> tuple[int, int]:
    """Returns the bytes per token that fused kernels keep of hidden states, and of what TP cuts in attention."""
    # Inputs of the two norms, of q k v and of the MLP.
    common = 4 * size * model.hidden_size
    # q, k, v and the input of the output projection.
    attention = size * sum(model.attention_sizes)
    if model.kv_lora_rank:
        common += 2 * size * (model.q_lora_rank + model.kv_lora_rank)  # inputs and outputs of the latents' norms
    elif model.has("self_attention.q_layernorm.weight"):
        attention += size * (model.query_size + model.key_value_size)  # inputs of the norms of q and k
    return common, attention


def _unfused(trainer: TrainerConfig, model: Architecture, size: int) -> tuple[int, int]:
    """Returns the same bytes of plain torch operators."""
    is_frozen = trainer.lora.rank > 0
    # Each norm: its input in float32, the normalized values (for the gradient of its weight), and its output.
    norm = _FLOAT32 + (0 if is_frozen else size) + size
    common = 2 * norm * model.hidden_size
    # q, k and v as attention gets them, its output and logsumexp, and the input of the output projection.
    outputs = model.attention_sizes[-1]
    attention = size * (sum(model.attention_sizes) + outputs) + _FLOAT32 * model.num_attention_heads
    if model.kv_lora_rank:
        common += norm * (model.q_lora_rank + model.kv_lora_rank) + size * 4 * model.qk_rope_head_dim
    elif trainer.strategy == "megatron":
        # v is a view that keeps all of q, k and v before the rotation.
        attention += size * (model.query_size + model.key_value_size)
        common += size * 4 * model.head_dim  # cosine and sine, of q and of k
    if not model.kv_lora_rank and model.has("self_attention.q_layernorm.weight"):
        attention += (_FLOAT32 + size) * (model.query_size + model.key_value_size)
    return common, attention


def _logits(trainer: TrainerConfig, model: Model, layout: Layout, tokens: int, *, is_gpu: bool) -> tuple[int, int]:
    rows, size = model.vocab_size // layout.tp, weight_bytes(trainer, is_gpu=is_gpu)
    at_once = min(tokens, max(1, _ENTRIES_AT_ONCE[is_gpu] // rows))
    is_kept = tokens * rows <= _KEPT_ENTRIES[is_gpu]  # if all tokens are predicted
    each = (2 * size, 2 * size) if is_gpu else _LOGITS_BYTES_CPU
    forward, backward = (num_bytes * (tokens if is_kept else at_once) * rows for num_bytes in each)
    gradient = 0 if trainer.lora.rank else _output_gradient(trainer, model, is_kept=is_kept, is_gpu=is_gpu)
    of_teacher = _TOP_K_BYTES * trainer.loss.distill.used_top_k * tokens
    return forward, backward + gradient * rows * model.hidden_size + of_teacher


def _output_gradient(trainer: TrainerConfig, model: Model, *, is_kept: bool, is_gpu: bool) -> int:
    """Returns the bytes of a weight's gradient in the output layer, while the backward pass computes it."""
    size = weight_bytes(trainer, is_gpu=is_gpu)
    if is_kept:
        return size
    is_float32 = size == _FLOAT32 or trainer.megatron.ddp_config.get("grad_reduce_in_fp32", True)
    if (
        isinstance(model, Architecture)
        and trainer.strategy == "megatron"
        and is_float32
        and not model.tie_word_embeddings
    ):
        return size  # added to the gradients directly; what autograd gets has no values
    return _FLOAT32
