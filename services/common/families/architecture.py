"""Reads a model from its config.json and its family's record: its tensors, what ranks hold of them, and which models a
strategy refuses. The trainer and `lockstep plan` thus have the same rules."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import cast

from services.common.errors import InvalidInput, NotFound
from services.common.families.layers import ALL_HEADS_NORMS, Size, Weight
from services.common.families.registry import FAMILIES, Family, Kind
from services.common.files.storage import JsonObject, parse_object

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Architecture:
    """Describes a decoder-only transformer with gated feed-forward networks.

    `num_experts` is 0 if no layer has experts; otherwise all have, except `dense_layers`. `intermediate_size` is the
    width of dense layers, or 0 if there are none. A layer of experts may have one more, which computes every token: its
    width is `shared_expert_intermediate_size`, or 0 if there is none. `flags` are those of the family's flags that the
    config sets to true.
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

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The kind of each layer."""
        most: Kind = "experts" if self.num_experts else "dense"
        kinds: list[Kind] = ["dense" if layer in self.dense_layers else most for layer in range(self.num_layers)]
        return tuple(kinds)

    @cached_property
    def kind_weights(self) -> Mapping[Kind, list[Weight]]:
        """The weights of a layer of each kind that the model has, in the order of the checkpoint."""
        return {
            kind: [weight for weight in weights if not weight.if_true or weight.if_true in self.flags]
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
    def norms_all_heads(self) -> bool:
        """Whether the norms of queries and keys are over all heads together."""
        return any(weight in ALL_HEADS_NORMS for weight in self.layer(0))

    def size(self, size: Size) -> int:
        """Returns the number that a `Size` of a weight stands for."""
        return size if isinstance(size, int) else getattr(self, size)

    def part_shapes(self, weight: Weight) -> list[Shape]:
        columns = () if weight.columns is None else (self.size(weight.columns),)
        return [(self.size(rows), *columns) for rows in weight.rows]

    def tensor_shapes(self, weight: Weight) -> list[Shape]:
        shapes = self.part_shapes(weight)
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
        content = file.read_bytes()
    except OSError as error:
        raise NotFound(f"model: {file} cannot be read: {error.strerror}", field="model") from error
    return parse_object(content, file, field="model")


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
    return Architecture(
        model_type=model_type,
        num_key_value_heads=_size(content, "num_key_value_heads", default=heads),
        head_dim=_size(content, "head_dim", default=sizes["hidden_size"] // heads),
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
    value = content.get(key) or default
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} is {content.get(key)!r}, not a size")
    return value


def _module(name: str) -> str:
    return name.rpartition(".")[0]


# Rotary scalings whose frequencies depend on the longest sequence that is computed together with a sample.
_LENGTH_DEPENDENT = ("dynamic", "longrope", "su")
# Keys of which each number is a list or a dictionary of modules, and more than any model has.
_COUNTS = ("num_hidden_layers", "num_experts", "num_local_experts", "n_routed_experts")
_MOST = 4096
# transformers' defaults of keys that a config.json may leave out.
_DEFAULTS: Mapping[str, Mapping[str, object]] = {"mistral": {"sliding_window": 4096}}
# Keys of a composite config that are true of its text part, too.
_OF_WHOLE = ("model_type", "quantization_config", "transformers_weights")
_FSDP = "; try strategy fsdp"


def require_counts(content: JsonObject, source: str) -> None:
    """Refuses a config.json with more layers or experts than any model has: making them would take all memory."""
    for key in _COUNTS:
        value = content.get(key)
        if isinstance(value, int | float) and value > _MOST:
            raise InvalidInput(f"model: {source}: {key} {value!r} is more than {_MOST}", field="model")


def text_of(content: JsonObject) -> JsonObject:
    """Returns the config of the text part of a model that also sees or hears; of others, `content`."""
    text = content.get("text_config")
    if not isinstance(text, Mapping):
        return content
    return {**cast(JsonObject, text), **{key: content[key] for key in _OF_WHOLE if key in content}}


def require_supported(content: JsonObject, strategy: str, source: str) -> None:
    """Refuses a config.json, or a transformers config, of a model that `strategy` would compute otherwise than
    transformers."""
    require_counts(content, source)
    content = text_of(content)
    rules = (_of_both,) if strategy == "fsdp" else (_of_both, _of_megatron)
    for rule in rules:
        for problem in rule(content):
            raise InvalidInput(f"model: {source}: {problem}", field="model")


def _of_both(content: JsonObject) -> Iterator[str]:
    model_type = content.get("model_type")
    if content.get("quantization_config"):
        yield "quantization_config is not supported: weights must be of floating point"
    if content.get("transformers_weights"):
        yield "transformers_weights is not supported: the weights must be in model.safetensors or in an index's files"
    for rope in _ropes(content):
        kind = _kind(rope)
        if kind in _LENGTH_DEPENDENT:
            yield (
                f"rotary scaling {kind!r} is not supported by any strategy: its result for a sample depends on the "
                "longest sample that is computed together with it"
            )
        if model_type in FAMILIES and not FAMILIES[model_type].has_partial_rotary:
            factor = rope.get("partial_rotary_factor", content.get("partial_rotary_factor"))
            if factor not in (None, 1):
                yield (
                    f"partial_rotary_factor {factor!r} is not supported by any strategy: transformers ignores it for "
                    f"model_type {model_type}, and vLLM applies it"
                )


def _of_megatron(content: JsonObject) -> Iterator[str]:
    model_type = content.get("model_type")
    if model_type not in FAMILIES:
        yield f"strategy megatron knows {', '.join(FAMILIES)}, not {model_type}{_FSDP}"
        return
    window = content.get("sliding_window", _DEFAULTS.get(str(model_type), {}).get("sliding_window"))
    if window and _is_window_on(content):  # 0 means none, as in Qwen2-MoE
        yield f"sliding_window {window!r} is not supported by strategy megatron{_FSDP}"
    for key, wanted in FAMILIES[model_type].required.items():
        value = content.get(key, wanted)
        if value != wanted and key != "sliding_window":
            yield f"{key} {value!r} is not supported by strategy megatron{_FSDP}"
    if FAMILIES[model_type].router == "sigmoid":
        yield from _of_sigmoid_router(content)
    for rope in _ropes(content):
        kind = _kind(rope)
        if kind not in ("default", "linear") and not (kind == "llama3" and _is_llama3(rope, content)):
            yield f"rotary scaling {dict(rope)} is not supported by strategy megatron{_FSDP}"


def _of_sigmoid_router(content: JsonObject) -> Iterator[str]:
    chosen, groups, kept = (content.get(key) for key in ("num_experts_per_tok", "n_group", "topk_group"))
    # Megatron always divides the weights of several experts by their sum, and never that of one.
    if (is_divided := content.get("norm_topk_prob", True)) is not True or chosen == 1:
        yield (
            f"norm_topk_prob {is_divided!r} with num_experts_per_tok {chosen!r} is not supported by strategy megatron"
            f"{_FSDP}"
        )
        return
    # transformers always scores a group by its best two, Megatron by the best num_experts_per_tok // topk_group.
    has_best_two = isinstance(chosen, int) and isinstance(kept, int) and kept > 0 and chosen // kept == 2
    if groups not in (None, 1) and not has_best_two:
        yield (
            f"n_group {groups!r} is supported by strategy megatron only with a topk_group of half of "
            f"num_experts_per_tok {chosen!r}, not {kept!r}{_FSDP}"
        )


def _is_window_on(content: JsonObject) -> bool:
    """Returns whether transformers applies a window: of the known families, only Qwen's read `use_sliding_window`."""
    model_type = str(content.get("model_type"))
    if model_type.startswith("qwen"):
        return bool(content.get("use_sliding_window"))
    return model_type in FAMILIES or bool(content.get("use_sliding_window", True))


def _ropes(content: JsonObject) -> list[JsonObject]:
    """Returns the rotary settings: one, or one for each type of layer. Older configs have them in `rope_scaling`."""
    given: object = content.get("rope_parameters") or content.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise InvalidInput(f"model: rope_parameters is {given!r}, not an object", field="model")
    rope = cast(JsonObject, given)
    nested = [cast(JsonObject, part) for part in rope.values() if isinstance(part, Mapping)]
    return nested or [rope]


def _kind(rope: JsonObject) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _is_llama3(rope: JsonObject, content: JsonObject) -> bool:
    """Returns whether the constants are those of Llama 3, because Megatron's cannot be set."""
    keys = ("original_max_position_embeddings", "max_position_embeddings")
    original = next((part[key] for key in keys for part in (rope, content) if part.get(key)), None)
    return (rope.get("low_freq_factor"), rope.get("high_freq_factor"), original) == (1, 4, 8192)
