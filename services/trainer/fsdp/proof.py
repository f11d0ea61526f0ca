"""Proves that a model computes packed sequences as transformers computes each alone, on a small copy of the model.

The copy has a layer of each kind, few experts, a small vocabulary and short windows, so that a few short sequences see
all of it within seconds. No list says which models are right: what differs is refused with the difference.
"""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from services.common.errors import InvalidInput
from services.trainer.fsdp.model import Layout, LogprobModel, make_model
from services.trainer.fsdp.structure import structure_of
from services.trainer.updates.packing import Microbatch

# Sequences of these lengths, the window and the chunk below make a query lose sight of keys, and states leak.
_LENGTHS = (23, 5, 40)
_WINDOW = 8
_VOCABULARY = 512
_WIDTH = 512
# Float32 rounding in models of large widths stays below this; the smallest known error is ten times as large.
MOST_NATS = 1e-3
_SMALLER: Mapping[str, int] = {
    "sliding_window": _WINDOW,
    "attention_chunk_size": _WINDOW,
    "vocab_size": _VOCABULARY,
    "vocab_size_per_layer_input": _VOCABULARY,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "intermediate_size_mlp": 256,
    "num_experts": 16,
    "num_local_experts": 16,
    "n_routed_experts": 16,
    "moe_num_experts": 16,
}
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "image_token_id", "video_token_id")

_Content = dict[str, Any]

_proven: dict[str, Layout] = {}


def layout_of(config: PretrainedConfig) -> Layout:
    """Returns the first layout in which the model's log-probabilities are those of transformers.

    Raises:
        InvalidInput: There is none.
    """
    key = config.to_json_string(use_diff=False)
    if key not in _proven:  # a trainer opens the same model for several roles, and again for each run
        _proven[key] = _prove(config)
    return _proven[key]


def _prove(config: PretrainedConfig) -> Layout:
    problems: list[str] = []
    for layout in Layout:
        try:
            difference = largest_difference(config, layout)
        except InvalidInput as error:
            problems.append(error.message)
        except Exception as error:  # noqa: BLE001 a family's code may fail in any way on what it was not written for
            problems.append(f"{error!r}")
        else:
            if difference <= MOST_NATS:  # which NaN is not
                return layout
            problems.append(f"log-probabilities differ by up to {difference:.2g} nats")
    raise InvalidInput(
        f"model: model_type {config.model_type} is not supported with strategy fsdp: compared with transformers on "
        f"single sequences, packed: {problems[0]}; in padded rows: {problems[1]}",
        field="model",
    )


def largest_difference(config: PretrainedConfig, layout: Layout) -> float:
    """Returns the largest difference of log-probabilities, in nats, from transformers on single sequences."""
    generator = torch.Generator().manual_seed(1)
    most = min(_VOCABULARY, config.get_text_config().vocab_size)
    sequences = [torch.randint(most // 2, most, (length,), generator=generator) for length in _LENGTHS]
    with torch.no_grad():
        try:
            model, want = _reference(shrink(config, width=_WIDTH), sequences)
        except Exception:  # noqa: BLE001 a family may derive other sizes from the width, and fail in any way
            model, want = _reference(shrink(config), sequences)
        got = _score(model, sequences, layout=layout)
    return max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True))


def _reference(config: PretrainedConfig, sequences: list[torch.Tensor]) -> tuple[PreTrainedModel, list[torch.Tensor]]:
    """Returns a model, and the log-probabilities of each sequence alone."""
    with torch.random.fork_rng(devices=()):
        model = make_model(config, dtype=torch.float32).eval()
    model.set_attn_implementation("eager")  # others leave out what their kernels lack, such as Gemma 2's caps
    _randomize(model)
    return model, [_alone(model, sequence) for sequence in sequences]


def shrink(config: PretrainedConfig, *, width: int = 0) -> PretrainedConfig:
    """Returns a smaller config of the same kind of model; with `width`, of that hidden size.

    What a family's code does not accept is left as it was.
    """
    content = config.to_dict()
    for change in _changes(config, width):
        changed = copy.deepcopy(content)
        if _is_possible(type(config), changed, change):
            content = changed
    return type(config).from_dict(content)


def _changes(config: PretrainedConfig, width: int) -> Iterator[Callable[[_Content], None]]:
    num_layers = _first_layers(config)
    whole = config.get_text_config().num_hidden_layers
    yield lambda content: _cut_layers(_text(content), whole, num_layers)
    yield _cut_vision
    yield _set_tokens
    for key, value in _SMALLER.items():
        yield functools.partial(_lower, key=key, value=value)
    if width:
        yield functools.partial(_lower, key="hidden_size", value=width)


def _text(content: _Content) -> _Content:
    nested = content.get("text_config")
    return nested if isinstance(nested, dict) else content


def _lower(content: _Content, *, key: str, value: int) -> None:
    text = _text(content)
    if isinstance(text.get(key), int) and text[key] > value:
        text[key] = value


def _set_tokens(content: _Content) -> None:
    for part in (content, _text(content)):
        part.update({key: 0 for key in _TOKENS if part.get(key) is not None})


def _cut_layers(text: _Content, whole: int, num_layers: int) -> None:
    for key, value in text.items():
        if isinstance(value, list) and len(value) == whole:
            text[key] = value[:num_layers]
    if shared := text.get("num_kv_shared_layers"):  # the last layers, which use the keys of earlier ones
        text["num_kv_shared_layers"] = max(0, num_layers - (whole - shared))
    if "num_hidden_layers" in text:
        text["num_hidden_layers"] = num_layers


def _cut_vision(content: _Content) -> None:
    vision = content["vision_config"]
    vision.update({key: 1 for key in ("num_hidden_layers", "depth", "num_layers") if key in vision})


def _is_possible(kind: type[PretrainedConfig], content: _Content, change: Callable[[_Content], None]) -> bool:
    """Changes `content`; returns whether there is a model of that config."""
    try:
        change(content)
        with init_empty_weights(include_buffers=False):
            make_model(kind.from_dict(copy.deepcopy(content)))
    except Exception:  # noqa: BLE001 a family's code may refuse any value in any way
        return False
    return True


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


def _alone(model: PreTrainedModel, sequence: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=sequence[None], use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, sequence[1:, None])[:, 0]


def _score(causal_lm: PreTrainedModel, sequences: list[torch.Tensor], *, layout: Layout) -> list[torch.Tensor]:
    model = LogprobModel(causal_lm, layout)
    lengths = [len(sequence) - 1 for sequence in sequences]
    microbatch = Microbatch(
        tokens_T=torch.cat([sequence[:-1] for sequence in sequences]),
        positions_T=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens_B1=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        lengths=tuple(lengths),
        predict_N=torch.arange(sum(lengths)),
        targets_N=torch.cat([sequence[1:] for sequence in sequences]),
        completion_lengths=tuple(lengths),
        columns={},
    )
    return list(model(microbatch, 1.0)[0].split(lengths))
