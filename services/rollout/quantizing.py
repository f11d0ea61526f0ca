"""Quantizes received weights layer by layer, as vLLM's reload does, and hashes the result.

vLLM's reload finds out anew in every publication which bytes go where. A `LayerMap` knows it from a recorded reload: it
copies a layer's received bytes to parameters as the checkpoint has them, and lets vLLM quantize these to what kernels
read. There is memory for only a few layers that are not quantized at a time.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from services.common.compat.torch import Copies
from services.common.weights.digest import WeightDigest
from services.common.weights.plan import ALIGN_BYTES
from services.rollout.compat.vllm.worker import begin_quantizing, finish_quantizing, is_quantized, loaded_tensors


class Place(NamedTuple):
    """A strided part of a storage, in elements."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A part of bucket number `bucket`, in elements of `dtype` from the bucket's start."""

    bucket: int
    dtype: torch.dtype
    place: Place

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the piece as a view of the bucket's bytes (uint8 [num_bytes])."""
        offset = int(flat.storage_offset()) // self.dtype.itemsize + self.place.offset
        return flat.view(self.dtype).as_strided(self.place.size, self.place.stride, offset)


@dataclass(frozen=True)
class Fill:
    """A copy of `piece` to `place` of a layer's parameter `name`, before the layer is quantized."""

    piece: Piece
    name: str
    place: Place


class LayerMap:
    """All copies of a publication into one layer that vLLM quantizes."""

    def __init__(self, layer: nn.Module, fills: Sequence[Fill]):
        self.layer = layer
        self._fills: dict[int, list[Fill]] = defaultdict(list)
        for fill in fills:
            self._fills[fill.piece.bucket].append(fill)
        self._left: set[int] = set()  # buckets that have not arrived; empty if the layer is quantized

    @property
    def buckets(self) -> Sequence[int]:
        return list(self._fills)

    def begin(self) -> None:
        """Forgets a publication that broke off."""
        self._left = set()

    def load(self, index: int, flat: torch.Tensor) -> None:
        """Copies the layer's part of a bucket, and quantizes the layer with its last part."""
        if not self._left:
            begin_quantizing(self.layer)
            self._left = set(self._fills)
        Copies(self.loaded(index), self.received(index, flat)).run(non_blocking=True)
        self._left.remove(index)
        if not self._left:
            finish_quantizing(self.layer)

    def received(self, index: int, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns the layer's parts of a received bucket, as views."""
        return [fill.piece.of(flat) for fill in self._fills[index]]

    def loaded(self, index: int) -> list[torch.Tensor]:
        """Returns the layer's tensors that these are copied to, while the layer is not quantized yet."""
        tensors = loaded_tensors(self.layer)
        return [
            tensors[fill.name].as_strided(
                fill.place.size, fill.place.stride, int(tensors[fill.name].storage_offset()) + fill.place.offset
            )
            for fill in self._fills[index]
        ]


def quantized_digest(model: nn.Module, device: torch.device) -> str:
    """Returns the hash of all that the model's quantized layers have, with their scales; "" if none is quantized."""
    names, start, digest = hashlib.blake2b(digest_size=16), 0, WeightDigest("", device)
    for name, tensor in _quantized_tensors(model):
        names.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}\n".encode())
        flat = _flat_bytes(tensor)
        digest.update(flat, start=start)
        start += flat.numel()
    if not start:
        return ""
    names.update(digest.hexdigest().encode())
    return names.hexdigest()


def _quantized_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, layer in model.named_modules():
        if is_quantized(layer):
            for key, tensor in sorted(loaded_tensors(layer).items()):
                yield f"{name}.{key}", tensor


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the content of a tensor in the order of its memory, padded to a multiple of 16 bytes."""
    axes = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)  # kernels read transposed weights
    flat = tensor.detach().permute(axes).reshape(-1).view(torch.uint8)
    return F.pad(flat, (0, -flat.numel() % ALIGN_BYTES))
