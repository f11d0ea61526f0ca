"""Compares a backend with transformers on a small copy of a model, for the proofs at start.

The copy has a layer of each kind, few experts, a small vocabulary and short windows, so that a few short sequences see
all of it within seconds.
"""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from services.common.json_values import JsonObject
from services.trainer.structure import make_model, structure_of
from services.trainer.updates.packing import Microbatch

# Sequences of these lengths, the window and the chunk below make a query lose sight of keys, and states leak.
_LENGTHS = (23, 5, 40)
_WINDOW = 8
_VOCABULARY = 512
_WIDTH = 512
# Float32 rounding in models of large widths stays below this; the smallest known error is ten times as large.
MOST_NATS = 1e-3
_SMALLER: Mapping[str, int] = {
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), _WINDOW),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), _VOCABULARY),
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "intermediate_size_mlp": 256,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 16),
}
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "image_token_id", "video_token_id")


@dataclass(frozen=True)
class Reference:
    """A small model of transformers with random float32 weights, and the log-probabilities of sequences, each alone."""

    model: PreTrainedModel
    sequences: Sequence[torch.Tensor]
    logprobs: Sequence[torch.Tensor]

    def packed(self) -> Microbatch:
        """Returns all sequences end to end, to predict each token but the first."""
        lengths = tuple(len(sequence) - 1 for sequence in self.sequences)
        return Microbatch(
            tokens_T=torch.cat([sequence[:-1] for sequence in self.sequences]),
            positions_T=torch.cat([torch.arange(length) for length in lengths]),
            cu_seqlens_B1=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
            lengths=lengths,
            predict_N=torch.arange(sum(lengths)),
            targets_N=torch.cat([sequence[1:] for sequence in self.sequences]),
            completion_lengths=lengths,
            columns={},
        )

    def difference(self, logprobs_N: torch.Tensor) -> float:
        """Returns the largest difference, in nats, of log-probabilities of the packed sequences."""
        return float((logprobs_N - torch.cat(list(self.logprobs))).abs().max())


@torch.no_grad()
def make_reference(config: PretrainedConfig) -> Reference:
    """Makes a small copy of a model with that config and computes log-probabilities with it."""
    generator = torch.Generator().manual_seed(1)
    most = min(_VOCABULARY, config.get_text_config().vocab_size)
    sequences = [torch.randint(most // 2, most, (length,), generator=generator) for length in _LENGTHS]
    try:
        return _reference(shrink(config, width=_WIDTH), sequences)
    except Exception:  # noqa: BLE001 a family may derive other sizes from the width, and fail in any way
        return _reference(shrink(config), sequences)


def _reference(config: PretrainedConfig, sequences: list[torch.Tensor]) -> Reference:
    with torch.random.fork_rng(devices=()):
        model = make_model(config, dtype=torch.float32).eval()
    model.set_attn_implementation("eager")  # others leave out what their kernels lack, such as Gemma 2's caps
    _randomize(model)
    return Reference(model, sequences, [_sequence_logprobs(model, sequence) for sequence in sequences])


def shrink(config: PretrainedConfig, *, width: int = 0) -> PretrainedConfig:
    """Returns a smaller config of the same kind of model; with `width`, of that hidden size.

    What a family's code does not accept is left as it was.
    """
    content = config.to_dict()
    for change in _changes(config, width):
        content = _changed(type(config), content, change)
    return type(config).from_dict(content)


def _changes(config: PretrainedConfig, width: int) -> Iterator[Callable[[JsonObject], None]]:
    num_layers = _first_layers(config)
    whole = config.get_text_config().num_hidden_layers
    yield lambda content: _cut_layers(_text(content), whole, num_layers)
    yield _cut_vision
    yield _set_tokens
    for key, value in _SMALLER.items():
        yield functools.partial(_lower, key=key, value=value)
    if width:
        yield functools.partial(_lower, key="hidden_size", value=width)


def _text(content: JsonObject) -> JsonObject:
    nested = content.get("text_config")
    return nested if isinstance(nested, dict) else content


def _lower(content: JsonObject, *, key: str, value: int) -> None:
    text = _text(content)
    if isinstance(text.get(key), int) and text[key] > value:
        text[key] = value


def _set_tokens(content: JsonObject) -> None:
    for part in (content, _text(content)):
        part.update({key: 0 for key in _TOKENS if part.get(key) is not None})


def _cut_layers(text: JsonObject, whole: int, num_layers: int) -> None:
    for key, value in text.items():
        if isinstance(value, list) and len(value) == whole:
            text[key] = value[:num_layers]
    if shared := text.get("num_kv_shared_layers"):  # the last layers, which use the keys of earlier ones
        text["num_kv_shared_layers"] = max(0, num_layers - (whole - shared))
    if "num_hidden_layers" in text:
        text["num_hidden_layers"] = num_layers


def _cut_vision(content: JsonObject) -> None:
    vision = content["vision_config"]
    vision.update({key: 1 for key in ("num_hidden_layers", "depth", "num_layers") if key in vision})


def _changed(kind: type[PretrainedConfig], content: JsonObject, change: Callable[[JsonObject], None]) -> JsonObject:
    """Returns the changed content, or `content` as it was if there is no model of that config."""
    changed = copy.deepcopy(content)
    try:
        change(changed)
        if changed != content:  # making a model takes a while, and most changes are of what other families have
            with init_empty_weights(include_buffers=False):
                make_model(kind.from_dict(copy.deepcopy(changed)))
    except Exception:  # noqa: BLE001 a family's code may refuse any value in any way
        return content
    return changed


def _first_layers(config: PretrainedConfig) -> int:
    """Returns how many of the first layers have all kinds of layers among them."""
    with init_empty_weights(include_buffers=False):
        model = make_model(config)
    kinds = [_kind(layer) for layer in model.get_submodule(structure_of(model).layers).children()]
    return max(kinds.index(kind) for kind in set(kinds)) + 1


def _kind(layer: nn.Module) -> tuple[object, ...]:
    """Returns what tells a layer from others: its modules, the shapes of its weights and its settings."""
    modules = tuple(
        (
            type(module).__name__,
            tuple(
                (name, value)
                for name, value in sorted(vars(module).items())
                if isinstance(value, bool | int | float | str) and "idx" not in name and "index" not in name
            ),
        )
        for module in layer.modules()
    )
    return modules, tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())


def _randomize(model: nn.Module) -> None:
    """Sets weights that let every part count: initial norms, biases, sinks and decays would hide what is left out."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.empty_like(parameter).uniform_(-1, 1, generator=generator)
            if parameter.ndim < 2:
                parameter += 0.3 * noise
            else:
                parameter.copy_(noise * 2 * (3 / parameter.shape[-1]) ** 0.5)  # scores large enough for a cap


def _sequence_logprobs(model: PreTrainedModel, sequence: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=sequence[None], use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, sequence[1:, None])[:, 0]
