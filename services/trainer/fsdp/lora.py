"""Adds low-rank adapters (arXiv 2106.09685) to linear layers: W x + alpha / rank * B A x.

A [rank, in] and B [out, rank] are parameters of the layer itself, so all other parameters keep their names. The rest of
the model is frozen.

For the families of the registry, targets and kinds are named as with strategy megatron, which stacks q, k and v in one
layer, and gate and up: with kind lora these share one A. In any other model each linear layer is a target of its own,
with the checkpoint's name.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from services.common.config.trainer import LoraConfig
from services.common.errors import InvalidInput
from services.common.families.architecture import make_architecture
from services.trainer import adapters
from services.trainer.compat.torch import set_class
from services.trainer.fsdp.model import WeightStream
from services.trainer.structure import structure_of

_Named = Iterator[tuple[str, torch.Tensor]]


class _Adapted(adapters.AdaptedLayer, nn.Linear):
    """A linear layer with an adapter, whose A other layers may share."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_scale: float

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out = super().forward(input)
        if not self.lora_is_on:
            return out
        return out + F.linear(F.linear(input, self.lora_A) * self.lora_scale, self.lora_B)


def sites_of(causal_lm: PreTrainedModel, lora: LoraConfig) -> dict[str, list[str]]:
    """Returns the name of each adapter with the layers that share its A; none if `lora.rank` is 0.

    Raises:
        InvalidInput: A target or an exclusion is none of this model, or nothing is left to train.
    """
    if not lora.rank:
        return {}
    try:
        model = make_architecture(causal_lm.config.to_dict(), "its config.json")
    except InvalidInput:  # not of the registry
        return _sites_by_structure(causal_lm, lora)
    sites = adapters.adapter_sites(model, lora).items()
    return {name: [tensor.removesuffix(".weight") for tensor in tensors] for name, tensors in sites}


def _sites_by_structure(causal_lm: PreTrainedModel, lora: LoraConfig) -> dict[str, list[str]]:
    """Finds the linear layers of the decoder's layers, each with a matrix of the checkpoint.

    Experts that are one tensor, convolutions, recurrent weights, a weight that several layers share, and a matrix that
    is no larger than its adapter have none.
    """
    base = WeightStream(causal_lm, torch.float32, torch.device("cpu"))
    uses = Counter(id(module.weight) for module in causal_lm.modules() if isinstance(module, nn.Linear))
    layers, found = structure_of(causal_lm).layers, dict[str, list[str]]()
    for name, layer in causal_lm.get_submodule(layers).named_modules(prefix=layers):
        if type(layer) is not nn.Linear or uses[id(layer.weight)] > 1:
            continue
        rows, columns = layer.weight.shape
        stored = base.checkpoint_name(f"{name}.weight")
        if stored and lora.rank * (rows + columns) < rows * columns:
            found[stored.removesuffix(".weight")] = [name]
    kinds = {name: name.rpartition(".")[2] for name in found}
    what = f"model_type {causal_lm.config.model_type} (experts and recurrent weights get no adapters)"
    adapters.require_targets(lora, sorted(set(kinds.values())), what)
    wanted = {name: of for name, of in found.items() if kinds[name] in (lora.target_modules or kinds.values())}
    return adapters.without_excluded(wanted, lora)


def add_adapters(causal_lm: PreTrainedModel, lora: LoraConfig, sites: dict[str, list[str]], *, seed: int) -> None:
    """Freezes the model and adds adapters at `sites`, if any. They are float32 and change no output at first."""
    if sites:
        causal_lm.requires_grad_(False)
    for name, layers in sites.items():
        _adapt(map(causal_lm.get_submodule, layers), name, lora, seed)


def _adapt(layers: Iterable[nn.Module], name: str, lora: LoraConfig, seed: int) -> None:
    shared: nn.Parameter | None = None
    for layer in layers:
        assert type(layer) is nn.Linear, "the families' matrices are linear layers"
        device = layer.weight.device
        if shared is None:
            shared = nn.Parameter(adapters.initial_a(name, lora.rank, layer.in_features, seed=seed).to(device))
        set_class(layer, _Adapted)
        assert isinstance(layer, _Adapted)
        layer.lora_A, layer.lora_scale = shared, lora.alpha / lora.rank
        layer.lora_B = nn.Parameter(torch.zeros(layer.out_features, lora.rank, device=device))


class AdapterStream:
    """Iterates over the policy's adapters with PEFT's names, and over its weights with the adapters merged.

    The names are those of the checkpoint, which vLLM reads, or of transformers' modules, by which PEFT finds them.
    """

    def __init__(self, causal_lm: nn.Module, base: WeightStream):
        self._base = base
        adapted = {name: layer for name, layer in causal_lm.named_modules() if isinstance(layer, _Adapted)}
        stored = {base.checkpoint_name(f"{name}.weight"): name for name in adapted}
        self._modules = {name: module for name, module in stored.items() if name}
        self._layers = {name: adapted[module] for name, module in self._modules.items()}

    def specs(self) -> list[tuple[str, torch.Tensor]]:
        return [
            (adapters.peft_name(name, which), self._base.meta(matrix))
            for name, layer in self._layers.items()
            for which, matrix in (("A", layer.lora_A), ("B", layer.lora_B))
        ]

    def named(self, *, of_modules: bool) -> _Named:
        for name, layer in self._layers.items():
            a, b = self._base.gather([layer.lora_A, layer.lora_B])
            module = self._modules[name] if of_modules else name
            yield adapters.peft_name(module, "A"), a
            yield adapters.peft_name(module, "B"), b

    def merged(self) -> _Named:
        """Yields the weights W + alpha / rank * B A, without gradient."""
        for name, weight in self._base:
            if layer := self._layers.get(name):
                a, b = self._base.gather([layer.lora_A, layer.lora_B])
                merged = torch.empty_like(weight)
                adapters.write_merged(merged, weight, b, a, layer.lora_scale)
                weight = merged
            yield name, weight
