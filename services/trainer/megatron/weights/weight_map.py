"""Which checkpoint tensors a Megatron parameter is made of, and how its shards are cut from and joined to them.

Megatron fuses q, k, v into one matrix, rows interleaved by key-value group, and gate, up into another, stacked. A
parameter of a tensor-parallel rank is a slice of those. Names of Megatron's local and TransformerEngine layers differ;
both are known here.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PretrainedConfig

from services.common.errors import InternalError
from services.trainer.megatron.transformer import EXPERT_NAMES


class Sliceable(Protocol):
    """A tensor, or one in a safetensors file of which only what is asked for is read."""

    def __getitem__(self, index: Any) -> torch.Tensor: ...


@dataclass(frozen=True)
class Part:
    """Checkpoint tensors behind one parameter of the model, and the parameter's shards.

    `cut(tensors, r, n)` is the shard of rank r of n; `join(shards)` gives the checkpoint tensors back, like `names`.
    """

    names: tuple[str, ...]
    cut: Callable[[Sequence[Sliceable], int, int], torch.Tensor]
    join: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
    is_expert: bool = False
    order: tuple[int, ...] = ()


class WeightMap:
    """The map of one model."""

    def __init__(self, hf: PretrainedConfig):
        self._names, self._is_tied = EXPERT_NAMES.get(hf.model_type), hf.tie_word_embeddings
        self._num_groups = hf.num_key_value_heads
        head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
        self._group_rows = (hf.num_attention_heads // hf.num_key_value_heads * head_dim, head_dim, head_dim)
        self._num_layers = hf.num_hidden_layers

    def part(self, name: str) -> Part:
        """The part of a parameter, whose `name` counts layers and experts over the whole model.

        Raises:
            InternalError: Megatron has built a parameter that this map does not know.
        """
        for pattern, rule in _TOP.items():
            if name == pattern:
                return self._top(name, *rule)
        match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
        if match is None:
            raise InternalError(f"no checkpoint tensor is known for Megatron's parameter {name}")
        return self._layer(int(match[1]), match[2])

    def is_published(self, name: str) -> bool:
        """False for the last pipeline stage's copy of a tied embedding."""
        return not (self._is_tied and name == "output_layer.weight")

    def _top(self, name: str, hf_name: str, is_rows: bool, place: int) -> Part:
        hf_name = "model.embed_tokens.weight" if self._is_tied and name == "output_layer.weight" else hf_name
        cut, join = _ROWS if is_rows else _WHOLE
        return Part((hf_name,), cut, join, order=(place * (self._num_layers + 1),))

    def _layer(self, layer: int, name: str) -> Part:
        prefix = f"model.layers.{layer}."
        for place, (pattern, (kind, suffixes)) in enumerate(_LAYER.items()):
            match = re.fullmatch(pattern, name)
            if match is None:
                continue
            order = (layer + 1, place)
            if kind == "qkv":
                names = tuple(f"{prefix}self_attn.{part}_proj.{match[1]}" for part in "qkv")
                return Part(names, self._cut_qkv, self._join_qkv, order=order)
            if kind.startswith("expert"):
                return self._expert(prefix, kind, int(match[1]), order)
            cut, join = {"whole": _WHOLE, "rows": _ROWS, "columns": _COLUMNS, "glu": _GLU}[kind]
            names = tuple(prefix + (self._names.router + ".weight" if s == "router" else s) for s in suffixes)
            return Part(names, cut, join, order=order)
        raise InternalError(f"no checkpoint tensor is known for Megatron's parameter decoder.layers.{layer}.{name}")

    def _expert(self, prefix: str, kind: str, expert: int, order: tuple[int, ...]) -> Part:
        gate, up, down = (f"{prefix}{self._names.expert}.{expert}.{part}.weight" for part in self._names.parts)
        names, (cut, join) = ((gate, up), _GLU) if kind == "expert fc1" else ((down,), _COLUMNS)
        return Part(names, cut, join, is_expert=True, order=(order[0], _EXPERTS_PLACE, expert, order[1]))

    def _cut_qkv(self, tensors: Sequence[Sliceable], rank: int, size: int) -> torch.Tensor:
        # With more ranks than groups a shard is a part of one group.
        per_group = sum(self._group_rows)
        rows = self._num_groups * per_group // size
        first, last = rank * rows // per_group, -(-(rank + 1) * rows // per_group)
        parts = []
        for tensor, height in zip(tensors, self._group_rows, strict=True):
            own = tensor[first * height : last * height]
            parts.append(own.view(last - first, height, *own.shape[1:]))
        begin = rank * rows - first * per_group
        return torch.cat(parts, 1).flatten(0, 1)[begin : begin + rows]

    def _join_qkv(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        fused = _cat(shards)
        grouped = fused.view(self._num_groups, -1, *fused.shape[1:])
        return [part.flatten(0, 1) for part in grouped.split(self._group_rows, 1)]


def _cut_rows(tensors: Sequence[Sliceable], rank: int, size: int) -> torch.Tensor:
    rows = _shape(tensors[0])[0] // size
    return torch.cat([tensor[rank * rows : (rank + 1) * rows] for tensor in tensors])


def _cut_columns(tensors: Sequence[Sliceable], rank: int, size: int) -> torch.Tensor:
    columns = _shape(tensors[0])[1] // size
    return tensors[0][:, rank * columns : (rank + 1) * columns]


def _join_glu(shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    halves = [shard.chunk(2) for shard in shards]
    return [_cat([half[i] for half in halves]) for i in (0, 1)]


def _cat(shards: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """One shard is not copied."""
    return torch.cat(list(shards), dim) if len(shards) > 1 else shards[0]


def _shape(tensor: Any) -> Sequence[int]:
    return tensor.get_shape() if hasattr(tensor, "get_shape") else tensor.shape


_WHOLE = (lambda tensors, rank, size: tensors[0][:], lambda shards: [shards[0]])
_ROWS = (_cut_rows, lambda shards: [_cat(shards)])
_COLUMNS = (_cut_columns, lambda shards: [_cat(shards, 1)])
_GLU = (_cut_rows, _join_glu)

# Megatron's name -> checkpoint name, cut by rows over TP, and place: before the layers or after them.
_TOP = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight", True, 0),
    "decoder.final_layernorm.weight": ("model.norm.weight", False, 1),
    "output_layer.weight": ("lm_head.weight", True, 2),
}
# Megatron's name below a layer -> kind of cut, checkpoint names below the layer. The order is that of publication:
# what the same ranks hold is together, so that it travels together.
_LAYER: dict[str, tuple[str, tuple[str, ...]]] = {
    r"self_attention\.linear_qkv\.(weight|bias)": ("qkv", ()),
    r"self_attention\.linear_proj\.weight": ("columns", ("self_attn.o_proj.weight",)),
    r"mlp\.linear_fc1\.weight": ("glu", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    r"mlp\.linear_fc2\.weight": ("columns", ("mlp.down_proj.weight",)),
    r"self_attention\.q_layernorm\.weight": ("whole", ("self_attn.q_norm.weight",)),
    r"self_attention\.k_layernorm\.weight": ("whole", ("self_attn.k_norm.weight",)),
    r"input_layernorm\.weight|self_attention\.linear_qkv\.layer_norm_weight": ("whole", ("input_layernorm.weight",)),
    r"pre_mlp_layernorm\.weight|mlp\.linear_fc1\.layer_norm_weight": ("whole", ("post_attention_layernorm.weight",)),
    r"mlp\.router\.weight": ("whole", ("router",)),
    r"mlp\.experts\.(?:local_experts\.(?=\d+\.linear_fc1)|linear_fc1\.weight)(\d+)(?:\.linear_fc1\.weight)?": (
        "expert fc1",
        (),
    ),
    r"mlp\.experts\.(?:local_experts\.(?=\d+\.linear_fc2)|linear_fc2\.weight)(\d+)(?:\.linear_fc2\.weight)?": (
        "expert fc2",
        (),
    ),
}
_EXPERTS_PLACE = list(_LAYER).index(next(pattern for pattern, (kind, _) in _LAYER.items() if kind == "expert fc1"))
