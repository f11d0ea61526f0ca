"""Says which models a strategy refuses, from config.json alone: the trainer and `lockstep plan` have the same rules."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

from services.common.errors import InvalidInput
from services.common.families.registry import FAMILIES

# Rotary scalings whose frequencies depend on the longest sequence that is computed together with a sample.
_LENGTH_DEPENDENT = ("dynamic", "longrope", "su")
# Keys of which each number is a list or a dictionary of modules, and more than any model has.
_COUNTS = ("num_hidden_layers", "num_experts", "num_local_experts", "n_routed_experts")
_MOST = 4096
# transformers' defaults of keys that a config.json may leave out.
_DEFAULTS: Mapping[str, Mapping[str, object]] = {"mistral": {"sliding_window": 4096}}
# Settings of architectures that change logits after the output layer.
_LOGIT_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
_FSDP = "; use strategy fsdp"


def require_counts(content: Mapping[str, Any], source: str) -> None:
    """Checks the content of config.json before anything is made in the numbers that it gives.

    Raises:
        InvalidInput: It has more layers or experts than any model, which would take all memory.
    """
    for key in _COUNTS:
        value = content.get(key)
        if isinstance(value, int | float) and value > _MOST:
            raise InvalidInput(f"model: {source}: {key} {value!r} is more than {_MOST}", field="model")


def require_supported(content: Mapping[str, Any], strategy: str, source: str) -> None:
    """Checks the content of config.json, or of a transformers config, against what `strategy` computes exactly.

    Raises:
        InvalidInput: The model would be computed otherwise than by transformers. The message has the key, `source`,
            and strategy fsdp if that supports the model.
    """
    require_counts(content, source)
    rules = (_of_both, _of_fsdp) if strategy == "fsdp" else (_of_both, _of_megatron)
    for rule in rules:
        for problem in rule(content):
            raise InvalidInput(f"model: {source}: {problem}", field="model")


def _of_both(content: Mapping[str, Any]) -> Iterator[str]:
    model_type = content.get("model_type")
    if content.get("quantization_config"):
        yield "quantization_config is not supported: weights must be of floating point"
    if content.get("transformers_weights"):
        yield "transformers_weights is not supported: the weights must be in model.safetensors or in an index's files"
    window = content.get("sliding_window", _DEFAULTS.get(str(model_type), {}).get("sliding_window"))
    if window and _is_window_on(content):  # 0 means none, as in Qwen2-MoE
        yield f"sliding_window {window!r} is not supported by any strategy"
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


def _of_fsdp(content: Mapping[str, Any]) -> Iterator[str]:
    for name in _LOGIT_SETTINGS:
        if content.get(name) not in (None, 1):
            yield f"{name} in its config.json is not supported with strategy fsdp"
    if others := set(content.get("layer_types") or ()) - {"full_attention"}:
        yield f"layers of type {', '.join(sorted(others))} are not supported with strategy fsdp"


def _of_megatron(content: Mapping[str, Any]) -> Iterator[str]:
    model_type = content.get("model_type")
    if model_type not in FAMILIES:
        yield f"strategy megatron knows {', '.join(FAMILIES)}, not {model_type}{_FSDP}"
        return
    for key, wanted in FAMILIES[model_type].required.items():
        value = content.get(key, wanted)
        if value != wanted and key != "sliding_window":
            yield f"{key} {value!r} is not supported by strategy megatron{_FSDP}"
    for rope in _ropes(content):
        kind = _kind(rope)
        if kind not in ("default", "linear") and not (kind == "llama3" and _is_llama3(rope, content)):
            yield f"rotary scaling {dict(rope)} is not supported by strategy megatron{_FSDP}"


def _is_window_on(content: Mapping[str, Any]) -> bool:
    """Returns whether transformers applies a window: of the known families, only Qwen's read `use_sliding_window`."""
    model_type = str(content.get("model_type"))
    if model_type.startswith("qwen"):
        return bool(content.get("use_sliding_window"))
    return model_type in FAMILIES or bool(content.get("use_sliding_window", True))


def _ropes(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the rotary settings: one, or one for each type of layer. Older configs have them in `rope_scaling`."""
    given: Any = content.get("rope_parameters") or content.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise InvalidInput(f"model: rope_parameters is {given!r}, not an object", field="model")
    rope = cast(Mapping[str, Any], given)
    nested = [cast(Mapping[str, Any], part) for part in rope.values() if isinstance(part, Mapping)]
    return nested or [rope]


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _is_llama3(rope: Mapping[str, Any], content: Mapping[str, Any]) -> bool:
    """Says whether the constants are those of Llama 3, because Megatron's cannot be set."""
    keys = ("original_max_position_embeddings", "max_position_embeddings")
    original = next((part[key] for key in keys for part in (rope, content) if part.get(key)), None)
    return (rope.get("low_freq_factor"), rope.get("high_freq_factor"), original) == (1, 4, 8192)
