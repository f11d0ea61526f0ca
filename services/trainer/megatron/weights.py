"""Maps Megatron's parameters to checkpoint tensors, cuts and joins their shards, and loads them.

The record of the model's family lists the tensors of each parameter. Megatron fuses q, k, v into one matrix with rows
interleaved by key-value group, and stacks gate and up in another. Each tensor-parallel rank holds a slice of those.
Megatron's local layers and TransformerEngine's have different names for some parameters; this module knows both.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from megatron.core.transformer.moe.router import TopKRouter

from services.common.errors import InternalError
from services.common.families.architecture import Architecture, Shape
from services.common.families.layers import Weight
from services.common.model_card import whole_weights
from services.trainer.adapters import is_adapter
from services.trainer.checkpoint.model_files import opened, require_finite, require_tensors
from services.trainer.megatron.experts import GroupedExperts
from services.trainer.megatron.model import Chunk, ValueModel
from services.trainer.megatron.role import Parallelism

HEAD = "output_layer.weight"
"""The head of a language model and of a critic. The checkpoint that a critic starts from has no critic head."""

EXPERT_BLOCKS = 16
"""Number of blocks of experts in a layer. A publication has each matrix of all experts of a block together. So with up
to this many expert-parallel ranks, all that a rank has of a layer is together too, and it sends it at once."""

# The axis that is cut of a tensor whose first axis counts experts.
_STACKED_AXES = {"rows": 1, "columns": 2}


class Sliceable(Protocol):
    """A tensor, or a slice of a safetensors file that reads only the requested rows and columns."""

    def __getitem__(self, index: Any) -> torch.Tensor: ...


@dataclass(frozen=True)
class Part:
    """The checkpoint tensors of one parameter of the model, and how to make the parameter's shards.

    `cut(tensors, r, n)` returns the shard of rank r of n. `join(shards)` returns the checkpoint tensors, in the order
    of `names` and with the `shapes`. `is_plain`: the numbers of a whole parameter are those of its tensors, one after
    another. `views(whole)` returns these tensors as views of a whole parameter; where their rows are interleaved, with
    a dimension for the groups. It is None if joining has to copy.
    """

    names: tuple[str, ...]
    cut: Callable[[Sequence[Sliceable], int, int], torch.Tensor]
    join: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
    is_expert: bool = False
    order: tuple[int, ...] = ()
    shapes: tuple[Shape, ...] = ()
    is_plain: bool = False
    views: Callable[[torch.Tensor], Sequence[torch.Tensor]] | None = None


class WeightMap:
    """Maps the parameters of one model."""

    def __init__(self, model: Architecture):
        self.model = model
        # Parameters on the same ranks are adjacent, so that a publication sends them together.
        in_order = {
            kind: sorted(weights, key=lambda weight: (weight.is_expert, weight.cut == "whole"))
            for kind, weights in model.kind_weights.items()
        }
        self._places = {
            kind: {weight.parameter: (place, weight) for place, weight in enumerate(weights)}
            for kind, weights in in_order.items()
        }
        output = model.family.embedding if model.tie_word_embeddings else model.family.output
        self._outside = {
            model.family.embedding.parameter: (model.family.embedding, 0),
            model.family.final_norm.parameter: (model.family.final_norm, 1),
            model.family.output.parameter: (output, 2),
        }

    def part(self, name: str) -> Part:
        """Returns the part of a parameter, whose `name` counts layers and experts over the whole model."""
        if name in self._outside:
            weight, place = self._outside[name]
            return self._part(weight, weight.tensors, order=(place * (self.model.num_layers + 1),))
        match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
        parameter, expert = _local_name(match[2]) if match else ("", 0)
        layer = int(match[1]) if match else -1
        places = self._places[self.model.kinds[layer]] if layer < self.model.num_layers else {}
        if parameter not in places:
            raise InternalError(f"no checkpoint tensor is known for Megatron's parameter {name}")
        place, weight = places[parameter]
        prefix = f"{self.model.family.layers}.{layer}."
        names = tuple(prefix + tensor.format(expert=expert) for tensor in weight.tensors)
        order: tuple[int, ...] = (layer + 1, place)
        if weight.is_expert:  # those of a block are neighbors in memory, so they are also neighbors in a publication
            block = expert // max(1, self.model.num_experts // EXPERT_BLOCKS)
            order = (layer + 1, len(places), block, place, expert)
        return self._part(weight, names, order)

    def is_published(self, name: str) -> bool:
        """Returns False for the last pipeline stage's copy of a tied embedding."""
        return not (self.model.tie_word_embeddings and name == self.model.family.output.parameter)

    def _part(self, weight: Weight, names: tuple[str, ...], order: tuple[int, ...]) -> Part:
        return Part(
            names,
            functools.partial(self._cut, weight),
            functools.partial(self._join, weight),
            is_expert=weight.is_expert,
            order=order,
            shapes=tuple(self.model.tensor_shapes(weight)),
            is_plain=weight.cut != "groups",
            views=None if weight.is_fused else functools.partial(self._views, weight),
        )

    def _cut(self, weight: Weight, tensors: Sequence[Sliceable], rank: int, size: int) -> torch.Tensor:
        if weight.cut == "whole":
            return tensors[0][:]
        if weight.is_stacked:
            axis = _STACKED_AXES[weight.cut]
            share = self.model.tensor_shapes(weight)[0][axis] // size
            return tensors[0][(slice(None),) * axis + (slice(rank * share, (rank + 1) * share),)]
        if weight.cut == "columns":
            columns = self.model.part_shapes(weight)[0][1] // size
            return tensors[0][:, rank * columns : (rank + 1) * columns]
        rows = self._rows(weight)

        def read(part: int, first: int, last: int) -> torch.Tensor:
            tensor, start = (tensors[0], sum(rows[:part])) if weight.is_fused else (tensors[part], 0)
            return tensor[start + first : start + last]

        if weight.cut == "groups":
            return self._cut_groups(read, rows, rank, size)
        shares = [height // size for height in rows]
        return torch.cat([read(part, rank * share, (rank + 1) * share) for part, share in enumerate(shares)])

    def _join(self, weight: Weight, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if weight.cut == "whole":
            return [shards[0]]
        if weight.is_stacked or weight.cut == "columns":
            return [_cat(shards, _STACKED_AXES[weight.cut] if weight.is_stacked else 1)]
        rows = self._rows(weight)
        if weight.cut == "groups":
            parts = [part.flatten(0, 1) for part in self._groups(_cat(shards), rows)]
        else:
            split = [shard.split([height // len(shards) for height in rows]) for shard in shards]
            parts = [_cat(of_part) for of_part in zip(*split, strict=True)]
        return [torch.cat(parts)] if weight.is_fused else parts

    def _views(self, weight: Weight, whole: torch.Tensor) -> Sequence[torch.Tensor]:
        if weight.is_stacked:
            return [whole]
        rows = self._rows(weight)
        return self._groups(whole, rows) if weight.cut == "groups" else whole.split(rows)

    def _rows(self, weight: Weight) -> list[int]:
        return [shape[0] for shape in self.model.part_shapes(weight)]

    def _cut_groups(
        self, read: Callable[[int, int, int], torch.Tensor], rows: Sequence[int], rank: int, size: int
    ) -> torch.Tensor:
        # With more ranks than groups a shard is a part of one group.
        heights = [height // self.model.num_key_value_heads for height in rows]
        per_group = sum(heights)
        share = sum(rows) // size
        first, last = rank * share // per_group, -(-(rank + 1) * share // per_group)
        groups = []
        for part, height in enumerate(heights):
            own = read(part, first * height, last * height)
            groups.append(own.view(last - first, height, *own.shape[1:]))
        begin = rank * share - first * per_group
        return torch.cat(groups, 1).flatten(0, 1)[begin : begin + share]

    def _groups(self, whole: torch.Tensor, rows: Sequence[int]) -> Sequence[torch.Tensor]:
        """Returns views of the parts: groups, rows of a group, columns."""
        groups = self.model.num_key_value_heads
        grouped = whole.view(groups, -1, *whole.shape[1:])
        return grouped.split([height // groups for height in rows], 1)


def _cat(shards: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    return torch.cat(list(shards), dim) if len(shards) > 1 else shards[0]


# TransformerEngine's names for the norms that it fuses with the layer that follows.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
# An expert's number is in the middle of the local layers' names, and at the end of TransformerEngine's.
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(?P<expert>\d+)\.(?P<layer>linear_fc[12])\.weight")
_FUSED_EXPERT = re.compile(r"mlp\.experts\.(?P<layer>linear_fc[12])\.weight(?P<expert>\d+)")


def _local_name(parameter: str) -> tuple[str, int]:
    """Returns a layer's parameter as the records name it, and the number of its expert, or 0 outside experts."""
    match = _LOCAL_EXPERT.fullmatch(parameter) or _FUSED_EXPERT.fullmatch(parameter)
    if match:
        return f"mlp.experts.{match['layer']}.weight", int(match["expert"])
    return _FUSED_NORMS.get(parameter, parameter), 0


def local_parameters(
    chunks: Sequence[Chunk], parallelism: Parallelism, *, adapters: bool = False
) -> dict[str, torch.Tensor]:
    """Returns this rank's parameters by their names in the whole model: those without adapters and critic heads, or
    with `adapters` only the adapters."""
    parameters: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        layers = {index: layer.layer_number - 1 for index, layer in enumerate(chunk.layers())}
        for name, tensor in _named_matrices(chunk):
            is_new = isinstance(chunk, ValueModel) and name == HEAD
            if is_adapter(name) == adapters and not is_new:
                parameters[_global_name(name, layers, chunk, parallelism)] = tensor
    return parameters


def _named_matrices(chunk: Chunk) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the parameters of a chunk and the biases of its routers, which are buffers; experts that share a parameter
    have a view of it each."""
    for prefix, module in chunk.named_modules():
        own = module.expert_weights() if isinstance(module, GroupedExperts) else module.named_parameters(recurse=False)
        yield from ((f"{prefix}.{name}" if prefix else name, tensor) for name, tensor in own)
        if isinstance(module, TopKRouter) and module.expert_bias is not None:
            yield f"{prefix}.expert_bias", module.expert_bias


def load_checkpoint_weights(
    parameters: Mapping[str, torch.Tensor], weight_map: WeightMap, parallelism: Parallelism, model_path: str
) -> None:
    """Copies only this rank's slices from the files of `model_path`, which `require_loadable` has checked."""
    stored = whole_weights(Path(model_path))
    with contextlib.ExitStack() as stack:
        files = {tensor.file for tensor in stored.values()}
        tensors = {file: stack.enter_context(opened(file)) for file in files}
        for name, parameter in parameters.items():
            part = weight_map.part(name)
            slices = [tensors[stored[one].file].get_slice(one) for one in part.names]
            shard = part.cut(slices, *parallelism.shard_index(parameter, is_expert=part.is_expert))
            with torch.no_grad():
                parameter.copy_(shard)
    named = ((" and ".join(weight_map.part(name).names), one.detach()) for name, one in parameters.items())
    require_finite(named, model_path)


def require_loadable(model: Architecture, model_path: str, *, is_critic: bool) -> None:
    """Checks, before a model of that size is made, that the files have exactly its tensors.

    A critic needs no output layer.
    """
    directory = Path(model_path)
    output, embedding = model.family.output.tensors[0], model.family.embedding.tensors[0]
    shapes = model.checkpoint_shapes()
    if is_critic:
        shapes.pop(output, None)
    tied = {output: embedding} if model.tie_word_embeddings else {}
    after = range(model.num_layers, model.num_layers + model.num_mtp_layers)
    ignored = [rf"^{re.escape(model.family.layers)}\.{number}\." for number in after]
    require_tensors(whole_weights(directory), shapes, tied, directory, has_head=not is_critic, ignored=ignored)


def _global_name(name: str, layers: dict[int, int], chunk: Chunk, parallelism: Parallelism) -> str:
    parts = name.split(".")
    if name.startswith("decoder.layers."):
        parts[2] = str(layers[int(parts[2])])
    if ".experts." not in name:
        return ".".join(parts)
    config = chunk.config
    assert config.num_moe_experts is not None
    first = parallelism.expert_rank * (config.num_moe_experts // config.expert_model_parallel_size)
    if "local_experts" in parts:
        place = parts.index("local_experts") + 1
        parts[place] = str(int(parts[place]) + first)
    elif parts[-1].startswith("weight"):  # ...linear_fc1.weight3; a stack of all experts has no number
        parts[-1] = "weight" + str(int(parts[-1].removeprefix("weight")) + first)
    return ".".join(parts)
