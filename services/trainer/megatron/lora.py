"""Adds low-rank adapters (arXiv 2106.09685) to Megatron's parallel linear layers: W x + alpha / rank * B A x.

A [rank, in] and B [out, rank] are parameters of the layer itself, so all other parameters keep their names.

    column parallel (linear_qkv, linear_fc1, ...):  A is whole on every rank, B is cut by rows like W
    row parallel (linear_proj, linear_fc2):         A is cut by columns like W, B is whole on every rank
    not cut (linear_q_down_proj, linear_kv_down_proj): A and B are whole on every rank, like W

In all cases the product of a rank's own matrices is its shard of B A: merging needs no communication, and the forward
communicates `rank` channels. The rest of the model is frozen.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from services.common.config.trainer import LoraConfig
from services.common.errors import InternalError, InvalidInput
from services.common.families.architecture import Architecture
from services.common.families.registry import FUSED, PARTS
from services.common.weights.buckets import Computed
from services.trainer.adapters import AdaptedLayer, adapter_sites, initial_a, peft_name, write_merged
from services.trainer.compat.megatron.state import rng_tracker
from services.trainer.compat.torch import CallableParameters, set_class
from services.trainer.megatron.experts import Offsets
from services.trainer.megatron.model import Chunk
from services.trainer.megatron.role import Parallelism
from services.trainer.megatron.weights import Part, WeightMap

ROW_PARALLEL = ("linear_proj", "linear_fc2")
NOT_CUT = ("linear_q_down_proj", "linear_kv_down_proj")

# Maps the axis of W that TP cuts to the matrix of the adapter that it cuts with it.
_CUT_MATRIX = {0: "B", 1: "A", -1: ""}
_Factors = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class _Site:
    """A layer that can have adapters. `prefix` is its parent in the whole model, such as decoder.layers.3.mlp."""

    prefix: str
    layer: str
    module: torch.nn.Module


@dataclass(frozen=True)
class _Shape:
    """A layer's adapters on this rank: the rows of each part, in `num_groups` interleaved groups."""

    rows: Mapping[str, int]
    num_groups: int
    cut_axis: int
    """The axis of W that TP cuts: 0 for its rows, 1 for its columns, or -1."""
    has_sequence_parallel: bool
    group: torch.distributed.ProcessGroup
    scale: float
    dropout: float

    def fuse(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Interleaves [..., rows] of the parts into [..., rows] of the layer."""
        if len(parts) == 1:
            return parts[0]
        return torch.cat([part.unflatten(-1, (self.num_groups, -1)) for part in parts], -1).flatten(-2)


class AdaptedLinear(AdaptedLayer):
    """A parallel linear layer with adapters. `lora_A` and `lora_B` map parts to matrices; a part may have none."""

    lora_A: CallableParameters
    lora_B: CallableParameters
    lora_shape: _Shape
    weight: torch.nn.Parameter
    training: bool
    state_dict: Callable[..., dict[str, torch.Tensor]]

    def forward(self, x: torch.Tensor, *args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor | None]:
        out, bias = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        return (out + self._adapter(x), bias) if self.lora_is_on else (out, bias)

    def merged_weight(self) -> torch.Tensor:
        merged = torch.empty_like(self.weight.detach())
        for target, part in zip(self._part_views(merged), self.merged_parts(self._part_views), strict=True):
            part.write(target)
        return merged

    def merged_parts(self, views: Callable[[torch.Tensor], Sequence[torch.Tensor]]) -> list[Computed]:
        """Returns the parts of W + scale * B A that `views` would return as views of it."""
        parts, weights = list(self.lora_shape.rows), views(self.weight.detach())
        a, b = ({part: one.detach() for part, one in matrices.items()} for matrices in (self.lora_A, self.lora_B))
        # B, with the dimensions of its part of the weight, and A; None if the part has no adapter.
        factors: list[_Factors | None]
        if len(parts) == 1:  # one adapter for all parts of the weight
            factors = [(own_b, a[parts[0]]) for own_b in views(b[parts[0]])]
        else:
            factors = [
                (b[part].view(*weight.shape[:-1], -1), a[part]) if part in a else None
                for part, weight in zip(parts, weights, strict=True)
            ]
        return [
            Computed(weight, functools.partial(_write_merged, weight=weight, factors=pair, scale=self.lora_shape.scale))
            for weight, pair in zip(weights, factors, strict=True)
        ]

    def _part_views(self, whole: torch.Tensor) -> Sequence[torch.Tensor]:
        """Returns views of the parts: groups, rows of a group, columns."""
        shape = self.lora_shape
        heights = [rows // shape.num_groups for rows in shape.rows.values()]
        return whole.unflatten(0, (shape.num_groups, -1)).split(heights, 1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Offsets = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        assert metadata is not None
        shape, groups = self.lora_shape, {"tp_group": self.lora_shape.group, "dp_cp_group": metadata["dp_cp_group"]}
        own = {name: value for name, value in self.state_dict(keep_vars=True).items() if name.startswith("lora_")}
        cut = f"lora_{_CUT_MATRIX[shape.cut_axis]}."
        axes = {name: shape.cut_axis for name in own if name.startswith(cut)}
        entries = make_sharded_tensors_for_checkpoint(own, prefix, axes, sharded_offsets, **groups)
        both = f"{prefix}lora_B.linear_fc1"
        if both in entries:  # its rows are this rank's gate and up
            entries[both] = apply_swiglu_sharded_factory(entries[both], sharded_offsets)
        # The base class treats the adapters as replicated tensors, so override their entries.
        return super().sharded_state_dict(prefix, sharded_offsets, metadata) | entries  # type: ignore[misc]

    def _adapter(self, x: torch.Tensor) -> torch.Tensor:
        """Returns scale * B A x, laid out like the layer's output."""
        shape = self.lora_shape
        a, b = self.lora_A(), self.lora_B()
        # The A of all parts in one product, so that what follows communicates once.
        low = F.linear(self._dropped(x), torch.cat(list(a.values()))) * shape.scale
        if shape.cut_axis < 0:
            pass  # each rank has the whole output of its tokens
        elif shape.cut_axis == 0 and shape.has_sequence_parallel:
            gather = mappings.gather_from_sequence_parallel_region
            low = gather(low, tensor_parallel_output_grad=True, group=shape.group)
        elif shape.cut_axis == 0:
            low = mappings.copy_to_tensor_model_parallel_region(low, group=shape.group)
        elif shape.has_sequence_parallel:
            low = mappings.reduce_scatter_to_sequence_parallel_region(low, group=shape.group)
        else:
            low = mappings.reduce_from_tensor_model_parallel_region(low, group=shape.group)
        lows = dict(zip(a, low.split([part.size(0) for part in a.values()], -1), strict=True))
        outputs = [
            F.linear(lows[part], b[part]) if part in lows else low.new_zeros(*low.shape[:-1], rows)
            for part, rows in shape.rows.items()
        ]
        return shape.fuse(outputs)

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        shape = self.lora_shape
        if not shape.dropout or not self.training:
            return x
        # Ranks with different slices draw their own dropout; ranks with the same input must draw the same.
        is_slice = shape.has_sequence_parallel or shape.cut_axis == 1
        with rng_tracker().fork() if is_slice else contextlib.nullcontext():
            return F.dropout(x, shape.dropout)


def add_adapters(
    chunks: Sequence[Chunk], model: Architecture, lora: LoraConfig, parallelism: Parallelism, *, seed: int
) -> None:
    """Freezes the chunks and adds adapters, the same in every layout; they change no output until trained."""
    names = adapter_sites(model, lora)
    for chunk in chunks:
        chunk.requires_grad_(False)
        if chunk.pre_process:  # recomputation builds a graph only if its inputs require gradients
            chunk.embedding.register_forward_hook(
                lambda module, args, output: output.requires_grad_() if torch.is_grad_enabled() else output
            )
        for site in list(_sites(chunk)):
            parts = [part for part in PARTS[lora.kind][site.layer] if f"{site.prefix}.{part}" in names]
            if parts:
                _adapt(site, parts, _shape(site, model, lora, parallelism), lora.rank, parallelism.tp_index, seed)


def adapted_layers(chunks: Sequence[Chunk]) -> Callable[[torch.Tensor], AdaptedLinear | None]:
    """Returns a function for WeightStream that returns the layer that adapts a parameter, if there is one."""
    modules = (module for chunk in chunks for module in chunk.modules())
    owners = {id(module.weight): module for module in modules if isinstance(module, AdaptedLinear)}
    return lambda parameter: owners.get(id(parameter))


def _sites(chunk: Chunk) -> Iterator[_Site]:
    for layer in chunk.layers():
        for name, module in layer.named_modules():
            parent, _, leaf = name.rpartition(".")
            if leaf in FUSED and ".experts." not in name:
                yield _Site(f"decoder.layers.{layer.layer_number - 1}.{parent}", leaf, module)


def _adapt(
    site: _Site, parts: Sequence[str], shape: _Shape, lora_rank: int, tp_index: tuple[int, int], seed: int
) -> None:
    module, weight = site.module, site.module.get_parameter("weight")
    tp_rank, tp_size = tp_index
    module.lora_A, module.lora_B = CallableParameters(), CallableParameters()
    for part in parts:
        num_inputs = weight.size(1) * (tp_size if shape.cut_axis == 1 else 1)
        a = initial_a(f"{site.prefix}.{part}", lora_rank, num_inputs, seed=seed)
        a = a.chunk(tp_size, 1)[tp_rank] if shape.cut_axis == 1 else a
        module.lora_A[part] = torch.nn.Parameter(a.to(weight).contiguous())
        module.lora_B[part] = torch.nn.Parameter(weight.new_zeros(shape.rows[part], lora_rank))
        for name, matrix in (("A", module.lora_A[part]), ("B", module.lora_B[part])):
            if name == _CUT_MATRIX[shape.cut_axis]:
                tensor_parallel.set_tensor_model_parallel_attributes(matrix, True, shape.cut_axis, 1)
                continue
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(matrix)
            # finalize_model_grads then sums the gradient over the tensor-parallel ranks, as each had a part of the
            # tokens.
            matrix.sequence_parallel = shape.has_sequence_parallel
    set_class(module, type(f"Adapted{type(module).__name__}", (AdaptedLinear, type(module)), {}))
    assert isinstance(module, AdaptedLinear)
    module.lora_shape = shape


def _shape(site: _Site, model: Architecture, lora: LoraConfig, parallelism: Parallelism) -> _Shape:
    parts, tp_size = PARTS[lora.kind][site.layer], parallelism.tp_index[1]
    num_rows, num_groups = site.module.get_parameter("weight").size(0), 1
    weights = [1] * len(parts)
    if len(parts) == 3:
        if model.num_key_value_heads % tp_size:
            raise InvalidInput(
                f"lora.kind {lora.kind}: tensor_model_parallel_size {tp_size} cuts the model's "
                f"{model.num_key_value_heads} key-value groups; use kind lora, or a size that divides them",
                field="lora.kind",
            )
        num_groups = model.num_key_value_heads // tp_size
        weights = [model.num_attention_heads // model.num_key_value_heads, 1, 1]
    return _Shape(
        rows={part: num_rows * weight // sum(weights) for part, weight in zip(parts, weights, strict=True)},
        num_groups=num_groups,
        cut_axis=-1 if site.layer in NOT_CUT else int(site.layer in ROW_PARALLEL),
        has_sequence_parallel=parallelism.config.has_sequence_parallel,
        group=parallelism.tp_group,
        scale=lora.alpha / lora.rank,
        dropout=lora.dropout,
    )


def _write_merged(target: torch.Tensor, *, weight: torch.Tensor, factors: _Factors | None, scale: float) -> None:
    if factors is None:
        target.copy_(weight)
    else:
        write_merged(target, weight, *factors, scale)


def adapter_part(weights: WeightMap, name: str) -> Part:
    """Returns the part of an adapter matrix, such as decoder.layers.3.self_attention.linear_qkv.lora_A.linear_q.

    A fused layer's adapter becomes one per matrix of the checkpoint, all with the same A.
    """
    match = re.fullmatch(r"(.+\.(\w+))\.lora_([AB])\.(\w+)", name)
    if match is None:
        raise InternalError(f"no adapter tensor is known for Megatron's parameter {name}")
    module, layer, matrix, part = match.groups()
    base, place = weights.part(f"{module}.weight"), 0
    names, join = base.names, base.join
    if part != layer:  # an adapter of only one of the matrices
        place = FUSED[layer].index(part)
        names, join = (names[place],), lambda shards: [torch.cat(list(shards))]
    if matrix == ("B" if layer in ROW_PARALLEL else "A"):  # which TP does not cut
        join = lambda shards: [shards[0]] * len(names)  # noqa: E731
    peft_names = tuple(peft_name(name, matrix) for name in names)
    return Part(peft_names, _cut, join, order=(*base.order, place, "AB".index(matrix)))


def _cut(*args: object) -> NoReturn:
    raise InternalError("adapters are not read from checkpoint names")
