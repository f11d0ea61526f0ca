"""Chooses, initializes and merges low-rank adapters (arXiv 2106.09685), the same for both backends."""

import contextlib
import fnmatch
import math
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch

from services.common.config.trainer import LoraConfig
from services.common.errors import InvalidInput, Reason
from services.common.families.architecture import Architecture
from services.common.families.registry import PARTS, lora_layer


class AdaptedLayer:
    """Marks the layers that have an adapter, which all derive from it."""

    lora_is_on = True


@contextlib.contextmanager
def without_adapters(models: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Turns the adapters of `models` off inside the context, which leaves the base model."""
    layers = [layer for model in models for layer in model.modules() if isinstance(layer, AdaptedLayer)]
    for layer in layers:
        layer.lora_is_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.lora_is_on = True


def is_adapter(parameter: str) -> bool:
    return ".lora_" in parameter


def adapter_sites(model: Architecture, lora: LoraConfig) -> dict[str, list[str]]:
    """Returns Megatron's name of each adapter's module, such as decoder.layers.3.mlp.linear_fc1, with the checkpoint
    names of the matrices that it adapts.

    Experts get no adapters, except a shared expert. So a layer of other experts has adapters only in its attention.

    Raises:
        InvalidInput: `lora.kind` does not have a target, an exclusion matches nothing, no target is left, an adapter
            would be for a part of a matrix that checkpoints store whole, or the engine could not add the adapters.
    """
    known = [part for parts in PARTS[lora.kind].values() for part in parts]
    require_targets(lora, known, f"kind {lora.kind}")
    if model.kv_lora_rank and lora.publish == "adapter":
        raise _refusal(
            "trainer.lora.publish",
            "adapter: vLLM computes latent attention with products of matrices that it has made beforehand, without "
            "adapters; use merged",
        )
    return without_excluded(dict(_sites(model, lora, lora.target_modules or known)), lora)


def require_targets(lora: LoraConfig, known: Collection[str], what: str) -> None:
    """Raises InvalidInput if a target is not one of those that `what` has."""
    for target in lora.target_modules:
        if target not in known:
            raise _refusal("trainer.lora.target_modules", f"{what} has no {target}, only {', '.join(known)}")


def _sites(model: Architecture, lora: LoraConfig, targets: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    for number, weight in model.layer_weights():
        layer = lora_layer(weight.parameter)
        if weight.is_expert or layer is None:
            continue
        parent = weight.parameter.removesuffix(f".{layer}.weight")
        tensors = [f"{model.family.layers}.{number}.{tensor}" for tensor in weight.tensors]
        for place, part in enumerate(PARTS[lora.kind][layer]):
            if part not in targets:
                continue
            if part != layer and weight.is_fused:
                raise InvalidInput(
                    f"lora.kind canonical_lora: the model's checkpoints have the parts of {layer} in one tensor, "
                    f"{tensors[0]}, which an adapter file can only adapt as a whole; use kind lora",
                    reason=Reason.INVALID_CONFIG,
                    field="lora.kind",
                )
            yield f"decoder.layers.{number}.{parent}.{part}", tensors if part == layer else [tensors[place]]


def without_excluded(sites: Mapping[str, list[str]], lora: LoraConfig) -> dict[str, list[str]]:
    """Returns the adapters' sites without those that the config excludes.

    Raises:
        InvalidInput: An exclusion matches nothing, or no site is left.
    """
    excluded: set[str] = set()
    for pattern in lora.exclude_modules:
        matches = fnmatch.filter(sites, pattern)
        if not matches:
            example = min(sites, default="decoder.layers.0.self_attention.linear_qkv")
            raise _refusal(
                "trainer.lora.exclude_modules", f"{pattern} excludes nothing; modules have names like {example}"
            )
        excluded |= set(matches)
    left = {name: tensors for name, tensors in sites.items() if name not in excluded}
    if not left:
        raise _refusal(
            "trainer.lora", "every target module of the model is excluded, or it has none, so there is nothing to train"
        )
    return left


def _refusal(field: str, problem: str) -> InvalidInput:
    return InvalidInput(f"{field}: {problem}", reason=Reason.INVALID_CONFIG, field=field)


def initial_a(name: str, rank: int, num_inputs: int, *, seed: int) -> torch.Tensor:
    """Returns the first matrix A [rank, num_inputs] of the adapter of module `name`; its B begins as zeros."""
    # From the name, so that each layout and backend draws the same. Python's own hash differs from process to process.
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
    a = torch.empty(rank, num_inputs)
    return torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)


def peft_name(tensor: str, matrix: str) -> str:
    """Returns PEFT's name of `matrix`, A or B, of the adapter of a checkpoint's weight."""
    return f"base_model.model.{tensor.removesuffix('.weight')}.lora_{matrix}.weight"


# Suffixes: G groups of rows, O rows of a group, I inputs, R the rank of the adapter.


def write_merged(
    target_GOI: torch.Tensor, weight_GOI: torch.Tensor, b_GOR: torch.Tensor, a_RI: torch.Tensor, scale: float
) -> None:
    """Writes W + scale * B A into a tensor, which may be W itself. All have one dtype; the groups may be left out.

    The sum is computed in float32 and rounded once. On a GPU one kernel does that, which reads W and writes the sum;
    float32 copies of W and of B A would move nine times as many bytes. The order of summation is the device's, so a
    merged bfloat16 weight may differ in its last bit from the result of another order. The trainer publishes exactly
    the weights that it merged, and both ends hash those bytes.
    """
    if target_GOI.is_cuda:
        from services.trainer.merging_gpu import write_sum  # late: it imports Triton

        write_sum(target_GOI, weight_GOI, b_GOR, a_RI, scale)
        return
    target_GOI.copy_(weight_GOI.float() + scale * (b_GOR.float() @ a_RI.float()))
