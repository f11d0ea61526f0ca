"""Reads a model from its config.json and its family's record: its tensors, and what ranks hold of them."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from services.common.errors import InvalidInput, NotFound
from services.common.families.layers import ALL_HEADS_NORMS, Size, Weight
from services.common.families.registry import FAMILIES, Family, Kind
from services.common.files import open_plain_file, parse_object
from services.common.json_values import JsonObject

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Architecture:
    """Describes a decoder-only transformer with gated feed-forward networks.

    `num_experts` is 0 if no layer has experts; otherwise all have, except `dense_layers`. `intermediate_size` is the
    width of dense layers, or 0 if there are none. A layer of experts may have one more, which computes every token: its
    width is `shared_expert_intermediate_size`, or 0 if there is none. `flags` are those of the family's flags that the
    config sets to true. With latent attention, `kv_lora_rank` is the size of the latent of keys and values, and
    `q_lora_rank` that of queries, or 0 if they have none; of the `head_dim` numbers of each query and key,
    `qk_rope_head_dim` are rotated.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    intermediate_size: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    flags: frozenset[str] = frozenset()
    dense_layers: frozenset[int] = frozenset()
    num_mtp_layers: int = 0
    """Layers of the checkpoint after the last, which are not loaded."""

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def query_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """The width of all key heads, which is that of all value heads."""
        return self.num_key_value_heads * self.head_dim

    @property
    def attention_sizes(self) -> tuple[int, int, int, int]:
        """The widths of all heads' queries, keys, values and outputs."""
        if self.kv_lora_rank:
            return self.query_size, self.query_size, self.value_size, self.value_size
        return self.query_size, self.key_value_size, self.key_value_size, self.query_size

    @property
    def direct_query_size(self) -> int:
        """The width of all query heads that are not made from a latent."""
        return 0 if self.q_lora_rank else self.query_size

    @property
    def gate_up_size(self) -> int:
        """The width of an expert's gate and up together."""
        return 2 * self.moe_intermediate_size

    @property
    def latent_size(self) -> int:
        """The width of what a token's keys and values are made of: the latent, and the part that all keys share."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def value_size(self) -> int:
        """The width of all value heads of latent attention."""
        return self.num_attention_heads * self.v_head_dim

    @property
    def expanded_size(self) -> int:
        """The width of the keys and values that are made from the latent."""
        return self.query_size - self.num_attention_heads * self.qk_rope_head_dim + self.value_size

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The kind of each layer."""
        most: Kind = "experts" if self.num_experts else "dense"
        kinds: list[Kind] = ["dense" if layer in self.dense_layers else most for layer in range(self.num_layers)]
        return tuple(kinds)

    @cached_property
    def kind_weights(self) -> Mapping[Kind, list[Weight]]:
        """The weights of a layer of each kind that the model has, in the order of the checkpoint. A weight with
        a size of 0 does not exist."""
        return {
            kind: [weight for weight in weights if self._exists(weight)]
            for kind, weights in self.family.kinds.items()
            if kind in self.kinds
        }

    def layer(self, number: int) -> list[Weight]:
        """Returns the weights of a layer in the order of the checkpoint."""
        return self.kind_weights[self.kinds[number]]

    @property
    def outside_layers(self) -> list[Weight]:
        """The weights before and after the layers; a tied output layer is the embedding and is left out."""
        ends = [self.family.embedding, self.family.final_norm]
        return ends if self.tie_word_embeddings else [*ends, self.family.output]

    def has(self, parameter: str) -> bool:
        """Returns whether some layer has this parameter."""
        return any(one.parameter == parameter for weights in self.kind_weights.values() for one in weights)

    @property
    def has_stacked_experts(self) -> bool:
        return any(weight.is_stacked for weights in self.kind_weights.values() for weight in weights)

    def _exists(self, weight: Weight) -> bool:
        sizes = (*weight.rows, 1 if weight.columns is None else weight.columns)
        return (not weight.if_true or weight.if_true in self.flags) and all(map(self.size, sizes))

    @property
    def norms_all_heads(self) -> bool:
        """Whether the norms of queries and keys are over all heads together."""
        return any(weight in ALL_HEADS_NORMS for weight in self.layer(0))

    def size(self, size: Size) -> int:
        """Returns the number that a `Size` of a weight stands for."""
        return size if isinstance(size, int) else getattr(self, size)

    def part_shapes(self, weight: Weight) -> list[Shape]:
        """Returns the shape of each part; of a weight of experts, that of one expert."""
        columns = () if weight.columns is None else (self.size(weight.columns),)
        return [(self.size(rows), *columns) for rows in weight.rows]

    def tensor_shapes(self, weight: Weight) -> list[Shape]:
        shapes = self.part_shapes(weight)
        if weight.is_stacked:
            return [(self.num_experts, *shape) for shape in shapes]
        return [(sum(shape[0] for shape in shapes), *shapes[0][1:])] if weight.is_fused else shapes

    def checkpoint_shapes(self) -> dict[str, Shape]:
        """Returns the shape of every tensor of the checkpoint, by name."""
        shapes: dict[str, Shape] = {}
        for weight in self.outside_layers:
            shapes |= zip(weight.tensors, self.tensor_shapes(weight), strict=True)
        for layer, weight in self.layer_weights():
            for expert in range(self.num_experts if weight.is_expert else 1):
                names = (f"{self.family.layers}.{layer}.{tensor.format(expert=expert)}" for tensor in weight.tensors)
                shapes |= zip(names, self.tensor_shapes(weight), strict=True)
        return shapes

    def layer_weights(self) -> Iterator[tuple[int, Weight]]:
        """Yields the weights of all layers, each with the layer's number."""
        return ((number, weight) for number in range(self.num_layers) for weight in self.layer(number))

    def weight_parameters(self, weight: Weight, tp: int = 1) -> int:
        """Returns how many numbers of a weight each of `tp` ranks holds."""
        numbers = sum(map(math.prod, self.part_shapes(weight)))
        return numbers if weight.cut == "whole" else numbers // tp

    def layer_parameters(self, number: int, tp: int = 1) -> int:
        """Returns how many numbers of a layer, without its experts, each of `tp` ranks holds."""
        return sum(self.weight_parameters(weight, tp) for weight in self.layer(number) if not weight.is_expert)

    def expert_parameters(self, number: int, etp: int = 1) -> int:
        """Returns how many numbers of one expert of a layer each of `etp` ranks holds; 0 for a dense layer."""
        return sum(self.weight_parameters(weight, etp) for weight in self.layer(number) if weight.is_expert)

    def whole_layer_parameters(self, number: int) -> int:
        """Returns how many numbers a layer has, with its experts."""
        return self.layer_parameters(number) + self.num_experts * self.expert_parameters(number)

    def embedding_parameters(self, tp: int = 1) -> int:
        """Returns how many numbers of the embedding, or of an untied output layer, each of `tp` ranks holds."""
        return self.vocab_size * self.hidden_size // tp

    @property
    def num_parameters(self) -> int:
        layers = sum(map(self.whole_layer_parameters, range(self.num_layers)))
        return layers + sum(map(self.weight_parameters, self.outside_layers))

    def tensor_sizes(self) -> Iterator[int]:
        """Yields how many numbers each checkpoint tensor has in the checkpoint's order, with a layer's experts last."""
        first, *last = self.outside_layers
        yield self.weight_parameters(first)
        sizes = {kind: list(self._layer_sizes(weights)) for kind, weights in self.kind_weights.items()}
        for kind in self.kinds:
            yield from sizes[kind]
        yield from map(self.weight_parameters, last)

    def _layer_sizes(self, weights: Iterable[Weight]) -> Iterator[int]:
        named = [
            (name, math.prod(shape))
            for weight in weights
            for name, shape in zip(weight.tensors, self.tensor_shapes(weight), strict=True)
        ]
        # A module's bias follows its weight.
        modules = list(dict.fromkeys(_module(name) for name, _ in named))
        named.sort(key=lambda pair: modules.index(_module(pair[0])))
        yield from (numbers for name, numbers in named if "{expert}" not in name)
        yield from [numbers for name, numbers in named if "{expert}" in name] * self.num_experts


def read_architecture(model_path: str | Path) -> Architecture:
    return make_architecture(read_content(model_path), str(Path(model_path) / "config.json"))


def read_content(model_path: str | Path) -> JsonObject:
    """Reads the config.json of a model directory.

    Raises:
        NotFound: There is no config.json.
        InvalidInput: It is not a JSON object.
    """
    file = Path(model_path) / "config.json"
    try:
        with open_plain_file(file) as opened:
            content = opened.read()
    except OSError as error:
        raise NotFound(f"model: {file} cannot be read: {error.strerror}", field="model") from error
    return parse_object(content, file)


def make_architecture(content: Mapping[str, object], source: str) -> Architecture:
    """Returns the architecture that a model's config describes; errors name `source`, where the config is from."""
    try:
        return _architecture(content, source)
    except (ValueError, TypeError, AttributeError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"model: {source} is not the config of a model: {error}", field="model") from error


def _architecture(content: Mapping[str, object], source: str) -> Architecture:
    model_type = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise InvalidInput(
            f"model: {source} is of model_type {model_type!r}; known are {', '.join(FAMILIES)}", field="model"
        )
    family = FAMILIES[model_type]
    num_layers = _size(content, _first(family.keys["num_layers"], content))
    dense = frozenset(number for number in range(num_layers) if family.is_dense(content, number))
    unused = "" if dense or "experts" not in family.kinds else "intermediate_size"
    keys = {name: _first(keys, content) for name, keys in family.keys.items() if name != unused}
    sizes = {name: _size(content, key) for name, key in keys.items()}
    if "num_shared_experts" in sizes:
        sizes["shared_expert_intermediate_size"] = sizes.pop("num_shared_experts") * sizes["moe_intermediate_size"]
    mtp = content.get("num_nextn_predict_layers", family.num_mtp_layers) if family.num_mtp_layers else 0
    heads = sizes["num_attention_heads"]
    if nope := sizes.pop("qk_nope_head_dim", 0):  # transformers' head_dim is only the rotated part
        head_dim = nope + sizes["qk_rope_head_dim"]
    else:
        head_dim = _size(content, "head_dim", default=sizes["hidden_size"] // heads)
    sizes |= {name: _nullable_size(content, name) for name in family.nullable}
    groups = _size(content, "num_key_value_heads", default=heads)
    if heads % groups:
        raise ValueError(f"num_key_value_heads {groups} does not divide num_attention_heads {heads}")
    return Architecture(
        model_type=model_type,
        num_key_value_heads=groups,
        head_dim=head_dim,
        tie_word_embeddings=content.get("tie_word_embeddings") is True,
        dense_layers=dense,
        num_mtp_layers=mtp if isinstance(mtp, int) else 0,
        flags=frozenset(key for key, default in family.flags.items() if content.get(key, default) is True),
        **sizes,
    )


def _first(keys: tuple[str, ...], content: Mapping[str, object]) -> str:
    """Returns the first of `keys` that is in `content`, or the last if none is."""
    return next((key for key in keys if key in content), keys[-1])


def _size(content: Mapping[str, object], key: str, *, default: int | None = None) -> int:
    value = default if content.get(key) is None else content[key]
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} is {content.get(key)!r}, not a size")
    return value


def _nullable_size(content: Mapping[str, object], key: str) -> int:
    if key not in content:
        raise ValueError(f"it has no {key}, which may be null")
    return 0 if content[key] is None else _size(content, key)


def _module(name: str) -> str:
    return name.rpartition(".")[0]
