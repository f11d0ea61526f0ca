"""Makes causal language models of transformers, and finds their parts and what they do to their logits."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from services.common.errors import InvalidInput


def make_model(hf_config: PretrainedConfig, **kwargs: object) -> PreTrainedModel:
    """Makes a model without its weights. One that also sees is made whole: its text part has the names of the files."""
    return class_of(hf_config).from_config(hf_config, **kwargs)


def class_of(hf_config: PretrainedConfig) -> type[AutoModelForCausalLM | AutoModelForImageTextToText]:
    """Returns the class of transformers that makes and loads such models."""
    is_composite = hf_config.get_text_config() is not hf_config
    has_class = type(hf_config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if is_composite and has_class else AutoModelForCausalLM


@dataclass(frozen=True)
class Structure:
    """The parts of a model by their names in it, and what becomes of the output layer's logits.

    The logits are `softcap` * tanh(`scale` * logits / softcap), or `scale` * logits if softcap is 0.
    """

    decoder: str
    layers: str
    head: str
    scale: float = 1.0
    softcap: float = 0.0


def structure_of(causal_lm: PreTrainedModel) -> Structure:
    """Returns the structure of a model, whose weights may be on the meta device.

    Raises:
        InvalidInput: It has no list of layers, or its log-probabilities are not those of its output layer's logits,
            scaled and capped.
    """
    names = {id(module): name for name, module in causal_lm.named_modules()}
    head, decoder = causal_lm.get_output_embeddings(), causal_lm.get_decoder()
    if decoder is causal_lm:  # as for Llama 4's
        decoder = getattr(causal_lm, "model", decoder)
    if not isinstance(head, nn.Linear) or id(head) not in names:
        raise _refusal("an output layer that is not linear")
    if head.bias is not None:
        raise _refusal(f"{names[id(head)]}.bias")
    lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList)]
    if not lists or decoder is causal_lm:
        raise _refusal(f"model_type {causal_lm.config.model_type}, whose layers are not in a list,")
    layers = max(lists, key=lambda one: sum(1 for _ in one.parameters()))
    found = Structure(names[id(decoder)], names[id(layers)], names[id(head)])
    return replace(found, **_logits_of(causal_lm, found))


class _Output(dict[str, object]):
    """What a base model returns; transformers' models read it by name, or the first of it by index."""

    def __getattr__(self, name: str) -> object:
        return self.get(name)

    def __getitem__(self, key: object) -> object:
        return self.get("last_hidden_state" if key == 0 else str(key))


def _logits_of(causal_lm: PreTrainedModel, parts: Structure) -> dict[str, float]:
    """Calls the model, whose base model returns a known hidden state meanwhile and whose output layer known logits.

    What it does between them is seen in what the output layer gets and in what the model returns. So no list of config
    keys is needed, of which each new family has others.
    """
    head, base_model = causal_lm.get_submodule(parts.head), causal_lm.get_submodule(parts.decoder.split(".")[0])
    assert isinstance(head, nn.Linear), "structure_of has checked it"
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 2, head.in_features, generator=generator)
    logits = torch.randn(1, 2, head.out_features, generator=generator) * 50
    logits[0, 0] *= 1e-6  # no cap changes these
    inputs: list[torch.Tensor] = []

    def known_logits(input: torch.Tensor) -> torch.Tensor:
        inputs.append(input)
        return logits.clone()

    # As attributes of these two modules, they take the place of the methods of their classes.
    base_model.forward, head.forward = lambda *args, **kwargs: _Output(last_hidden_state=hidden), known_logits
    try:
        returned = causal_lm(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False).logits.float()
    except Exception as error:  # anything may be read of the base model
        raise _refusal(f"model_type {causal_lm.config.model_type} ({error!r})") from error
    finally:
        del base_model.forward, head.forward
    if len(inputs) != 1 or inputs[0].shape != hidden.shape or returned.shape != logits.shape:
        raise _refusal(f"model_type {causal_lm.config.model_type}, whose logits are not those of its output layer,")
    before, scale = _ratio(inputs[0], hidden), _ratio(returned[0, 0], logits[0, 0])
    for softcap in (0.0, *_possible_softcaps(causal_lm)):
        capped = softcap * torch.tanh(scale * logits / softcap) if softcap else scale * logits
        if torch.allclose(returned, capped, rtol=1e-4, atol=0):
            return {"scale": before * scale, "softcap": softcap}
    raise _refusal(f"model_type {causal_lm.config.model_type}, which changes its logits in an unknown way,")


def _ratio(got: torch.Tensor, given: torch.Tensor) -> float:
    ratio = float((got.double() / given.double()).median())
    if not torch.allclose(got, ratio * given, rtol=1e-4, atol=0):
        raise _refusal("an output layer whose input or output is changed by more than a factor")
    return round(ratio, 6) if abs(ratio - round(ratio, 6)) < 1e-6 * abs(ratio) else ratio


def _possible_softcaps(causal_lm: PreTrainedModel) -> Iterator[float]:
    """Yields every number of the config, one of which the cap must be."""
    for value in causal_lm.config.get_text_config().to_dict().values():
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            yield float(value)


def _refusal(what: str) -> InvalidInput:
    return InvalidInput(f"model: {what} is not supported with strategy fsdp", field="model")
