"""Chooses and initializes low-rank adapters (arXiv 2106.09685), the same for both backends."""

import contextlib
import fnmatch
import math
import zlib
from collections.abc import Collection, Iterable, Iterator

import torch

from services.common.config.trainer import LoraConfig
from services.common.errors import InvalidInput, Reason
from services.common.families.registry import PARTS


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


def target_parts(lora: LoraConfig) -> set[str]:
    """Returns the parts of a layer that get an adapter.

    Raises:
        InvalidInput: `lora.kind` does not have a target.
    """
    known = [part for parts in PARTS[lora.kind].values() for part in parts]
    for target in lora.target_modules:
        if target not in known:
            raise InvalidInput(
                f"trainer.lora.target_modules: kind {lora.kind} has no {target}, only {', '.join(known)}",
                reason=Reason.INVALID_CONFIG,
                field="trainer.lora.target_modules",
            )
    return set(lora.target_modules or known)


def excluded_modules(lora: LoraConfig, names: Collection[str]) -> set[str]:
    """Returns the modules that `lora` excludes among `names`, which are all target modules of the model.

    Raises:
        InvalidInput: An exclusion matches nothing, or no target is left.
    """
    excluded: set[str] = set()
    for pattern in lora.exclude_modules:
        matches = fnmatch.filter(names, pattern)
        if not matches:
            raise InvalidInput(
                f"trainer.lora.exclude_modules: {pattern} excludes nothing; modules have names like "
                f"{min(names, default='decoder.layers.0.self_attention.linear_qkv')}",
                reason=Reason.INVALID_CONFIG,
                field="trainer.lora.exclude_modules",
            )
        excluded |= set(matches)
    if not set(names) - excluded:
        raise InvalidInput(
            "trainer.lora: every target module of the model is excluded, or it has none, so there is nothing to train",
            reason=Reason.INVALID_CONFIG,
            field="trainer.lora",
        )
    return excluded


def initial_a(name: str, rank: int, num_inputs: int, *, seed: int) -> torch.Tensor:
    """Returns the first matrix A [rank, num_inputs] of the adapter of module `name`; its B begins as zeros."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
    a = torch.empty(rank, num_inputs)
    return torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)


def refuse_part(layer: str, tensor: str) -> InvalidInput:
    """Returns the error about an adapter for a part of `layer`, which checkpoints store whole in `tensor`."""
    return InvalidInput(
        f"lora.kind canonical_lora: the model's checkpoints have the parts of {layer} in one tensor, "
        f"{tensor}, which an adapter file can only adapt as a whole; use kind lora",
        reason=Reason.INVALID_CONFIG,
        field="lora.kind",
    )


def peft_name(tensor: str, matrix: str) -> str:
    """Returns PEFT's name of `matrix`, A or B, of the adapter of a checkpoint's weight."""
    return f"base_model.model.{tensor.removesuffix('.weight')}.lora_{matrix}.weight"
