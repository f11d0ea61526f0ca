"""Refuses, from config.json, models that a strategy would compute otherwise than transformers, and chooses what
computes attention with strategy fsdp. The trainer, `lockstep plan` and `lockstep doctor` thus have the same rules.
"""

import enum
import math
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from services.common.errors import InvalidInput
from services.common.families.architecture import read_content
from services.common.families.registry import FAMILIES, Family
from services.common.json_values import JsonObject

HAS_FLASH_ATTN = find_spec("flash_attn") is not None
# The largest heads of FlashAttention's kernels.
_MOST_OF_HEAD = 256
# Torch's kernel takes multiples of this alone, and nothing pads heads for its variable-length form.
_PART_OF_HEAD = 8


class Kernel(enum.StrEnum):
    """What computes attention."""

    TORCH = "torch's variable-length FlashAttention"
    FLASH_ATTN = "flash-attn"
    PADDED = "padded samples in torch's operators"


def choose(device: str, dtype: str, head_size: int, *, has_cap: bool = False) -> Kernel:
    """Returns the kernel for heads of a size; a cap of the scores is known to flash-attn alone.

    `device` is a type of torch.device, `dtype` ends with the name of a torch.dtype.
    """
    if device != "cuda" or dtype.endswith("float32") or head_size > _MOST_OF_HEAD:
        return Kernel.PADDED
    if not has_cap:
        return Kernel.PADDED if head_size % _PART_OF_HEAD else Kernel.TORCH
    return Kernel.FLASH_ATTN if HAS_FLASH_ATTN else Kernel.PADDED


# Rotary scalings whose frequencies depend on the longest sequence that is computed together with a sample.
_LENGTH_DEPENDENT = ("dynamic", "longrope", "su")
# Models for which `dynamic` with an alpha sets a fixed base, up to max_position_embeddings.
_HAS_ALPHA = ("hunyuan_v1_dense", "hunyuan_v1_moe")
# The least and the most of numbers that any model has. Families name layers and experts in their own ways, and
# `num_layers` with its short forms are transformers' other names of num_hidden_layers. Making a list of more would take
# all memory, a length above the most would take an engine's, and a base or factor of rotary angles or an epsilon of a
# norm outside of its bounds makes log-probabilities NaN, or the same for all tokens.
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
_BOUNDS: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys((*_LAYERS, *_HEADS), (0, 4096)),
    **dict.fromkeys(_EXPERTS, (0, 16_384)),  # transformers' Doge has as many
    "num_labels": (0, 100_000),
    **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), (0, 10**8)),
    "max_position_embeddings": (0, 20_000_000),  # of each an engine has a row of angles; Llama 4 has half as many
    **dict.fromkeys(_EPSILONS, (1e-30, 0.5)),
    **dict.fromkeys(("rope_theta", "factor"), (1e-30, 1e30)),
}
_DTYPES = ("float16", "half", "bfloat16", "float32", "float", "float64", "double")
# Those that transformers knows, which cannot be asked where torch is not installed.
ACTIVATIONS = frozenset(
    "gelu gelu_10 gelu_accurate gelu_fast gelu_new gelu_python gelu_python_tanh gelu_pytorch_tanh hardswish laplace "  # noqa: SIM905
    "leaky_relu linear mish prelu quick_gelu relu relu2 relu6 sigmoid silu sqrtsoftplus swish tanh xielu".split()
)
# transformers' defaults of keys that a config.json may leave out.
_DEFAULTS: Mapping[str, Mapping[str, object]] = {"mistral": {"sliding_window": 4096}}
# Keys of a composite config that are true of its text part, too.
_OF_WHOLE = ("model_type", "quantization_config", "transformers_weights")
ASK_FSDP = "; lockstep run --dry-run says whether strategy fsdp supports it"


def require_bounds(content: JsonObject, source: str) -> None:
    """Refuses a config.json with a number that no model has, or a dtype that is none of floating point.

    Numbers of its parts, such as text_config, vision_config and rope_parameters, and of layers in a list, count too.
    """
    parts = [content]
    for part in parts:
        parts += [cast(JsonObject, value) for value in part.values() if isinstance(value, dict)]
        for key in _BOUNDS.keys() & part.keys():
            (least, most), value = _BOUNDS[key], part[key]
            for one in cast(list[object], value) if isinstance(value, list) else [value]:
                is_right = isinstance(one, int | float) and not isinstance(one, bool) and least <= one <= most
                if isinstance(one, str | int | float) and not is_right:
                    problem = f"{key} {one!r} is not a number from {least:g} to {most:g}"
                    raise InvalidInput(f"model: {source}: {problem}", field="model")
    for key in ("dtype", "torch_dtype"):
        dtype = content.get(key)
        if isinstance(dtype, str | int | float) and dtype not in _DTYPES:
            raise InvalidInput(f"model: {source}: {key} {dtype!r} is not one of {', '.join(_DTYPES)}", field="model")


def check_bounds(model_path: str | Path) -> None:
    """Checks the config.json of a model's directory like `require_bounds`, before transformers makes a config of it."""
    require_bounds(read_content(model_path), f"{model_path}/config.json")


def text_of(content: JsonObject) -> JsonObject:
    """Returns the config of the text part of a model that also sees or hears; of others, `content`."""
    text = content.get("text_config")
    if not isinstance(text, Mapping):
        return content
    return {**cast(JsonObject, text), **{key: content[key] for key in _OF_WHOLE if key in content}}


def require_supported(content: JsonObject, strategy: str, source: str) -> None:
    """Refuses a config.json, or a transformers config, of a model that `strategy` would compute otherwise than
    transformers."""
    require_bounds(content, source)
    content = text_of(content)
    if not isinstance(content.get("model_type", ""), str):
        raise InvalidInput(f"model: {source}: model_type {content['model_type']!r} is not a name", field="model")
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
    if model_type in FAMILIES and str(act := content.get("hidden_act", "silu")) not in ACTIVATIONS:
        yield f"hidden_act {act!r} is not a function that transformers knows"
    for rope in _ropes(content).values():
        kind = _kind(rope)
        is_fixed = kind == "dynamic" and bool(rope.get("alpha")) and model_type in _HAS_ALPHA
        if kind in _LENGTH_DEPENDENT and not is_fixed:
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
        yield f"strategy megatron knows {', '.join(FAMILIES)}, not {model_type}{ASK_FSDP}"
        return
    window = content.get("sliding_window", _DEFAULTS.get(str(model_type), {}).get("sliding_window"))
    if window and _is_window_on(content) and not FAMILIES[model_type].has_windows:  # 0 means none, as in Qwen2-MoE
        yield f"sliding_window {window!r} is not supported by strategy megatron{ASK_FSDP}"
    for key, wanted in FAMILIES[model_type].required.items():
        value = content.get(key, wanted)
        if value != wanted and key != "sliding_window":
            yield f"{key} {value!r} is not supported by strategy megatron{ASK_FSDP}"
    if FAMILIES[model_type].router == "sigmoid":
        yield from _of_sigmoid_router(content)
    yield from _of_rotary_scaling(content, FAMILIES[model_type])


def _of_rotary_scaling(content: JsonObject, family: Family) -> Iterator[str]:
    for layers, rope in _ropes(content).items():
        is_known = _is_latent_rope(rope) if family.nullable else _is_rope(rope, content)
        is_known = is_known or (family.has_yarn and _is_yarn(rope))
        # Layers with a window have a rotary embedding of their own, which is not scaled.
        if not is_known or (layers == "sliding_attention" and _kind(rope) != "default"):
            where = f" of {layers}" if layers else ""
            yield f"rotary scaling {dict(rope)}{where} is not supported by strategy megatron{ASK_FSDP}"


def _of_sigmoid_router(content: JsonObject) -> Iterator[str]:
    chosen, groups, kept = (content.get(key) for key in ("num_experts_per_tok", "n_group", "topk_group"))
    # Megatron always divides the weights of several experts by their sum, and never that of one.
    if (is_divided := content.get("norm_topk_prob", True)) is not True or chosen == 1:
        yield (
            f"norm_topk_prob {is_divided!r} with num_experts_per_tok {chosen!r} is not supported by strategy megatron"
            f"{ASK_FSDP}"
        )
        return
    # transformers always scores a group by its best two, Megatron by the best num_experts_per_tok // topk_group.
    has_best_two = isinstance(chosen, int) and isinstance(kept, int) and kept > 0 and chosen // kept == 2
    if groups not in (None, 1) and not has_best_two:
        yield (
            f"n_group {groups!r} is supported by strategy megatron only with a topk_group of half of "
            f"num_experts_per_tok {chosen!r}, not {kept!r}{ASK_FSDP}"
        )


def _is_window_on(content: JsonObject) -> bool:
    """Returns whether transformers applies a window: of the known families, only Qwen's read `use_sliding_window`."""
    model_type = str(content.get("model_type"))
    if model_type.startswith("qwen"):
        return bool(content.get("use_sliding_window"))
    return model_type in FAMILIES or bool(content.get("use_sliding_window", True))


def _ropes(content: JsonObject) -> Mapping[str, JsonObject]:
    """Returns the rotary settings: one for each type of layer, or one for all, under "". Older configs have them in
    `rope_scaling`."""
    given: object = content.get("rope_parameters") or content.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise InvalidInput(f"model: rope_parameters is {given!r}, not an object", field="model")
    rope = cast(JsonObject, given)
    nested = {layers: cast(JsonObject, part) for layers, part in rope.items() if isinstance(part, Mapping)}
    return nested or {"": rope}


def rope_kinds(content: JsonObject) -> set[str]:
    """Returns how the rotary embeddings of a config.json are scaled, such as "yarn", or "default" if they are not."""
    return {_kind(rope) for rope in _ropes(content).values()}


def _kind(rope: JsonObject) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _is_rope(rope: JsonObject, content: JsonObject) -> bool:
    """Returns whether Megatron computes a rotary scaling as transformers does."""
    kind = _kind(rope)
    return kind in ("default", "linear") or (kind == "llama3" and _is_llama3(rope, content))


def _is_yarn(rope: JsonObject) -> bool:
    """Returns whether a scaling is YaRN with its paper's attention factor (arXiv 2309.00071, section 3.4)."""
    factor, given = rope.get("factor"), rope.get("attention_factor")
    if _kind(rope) != "yarn" or not isinstance(factor, int | float):
        return False
    return given is None or (isinstance(given, int | float) and math.isclose(given, 0.1 * math.log(factor) + 1))


def _is_latent_rope(rope: JsonObject) -> bool:
    """Returns whether Megatron's latent attention does, which rounds where YaRN's ramp begins and ends."""
    is_rounded = rope.get("truncate", True) is True and rope.get("attention_factor") is None
    return _kind(rope) == "default" or (_kind(rope) == "yarn" and is_rounded)


def _is_llama3(rope: JsonObject, content: JsonObject) -> bool:
    """Returns whether the constants are those of Llama 3, because Megatron's cannot be set."""
    keys = ("original_max_position_embeddings", "max_position_embeddings")
    original = next((part[key] for key in keys for part in (rope, content) if part.get(key)), None)
    return (rope.get("low_freq_factor"), rope.get("high_freq_factor"), original) == (1, 4, 8192)
