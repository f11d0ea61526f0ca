"""Quantizes received weights layer by layer, as vLLM's reload does, and hashes the result.

vLLM's reload finds out anew in every publication which bytes go where. A `LayerMap` knows it from a recorded reload: it
copies a layer's received bytes to parameters as the checkpoint has them, and lets vLLM quantize these to what kernels
read. There is memory for only a few layers that are not quantized at a time. Where each row of a weight has a scale of
its own, and this was checked to give vLLM's bytes, received rows are quantized to where kernels read them.
"""

import functools
import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import nn

from services.common.compat.torch import Copies
from services.common.weights.buckets import WeightDigest
from services.common.weights.plan import ALIGN_BYTES, contiguous_stride
from services.rollout.compat.worker import (
    SCALE,
    WEIGHT,
    begin_quantizing,
    finish_quantizing,
    is_quantized,
    loaded_tensors,
    row_quantizer,
)

# The hash joins tensors with fewer bytes than this, as one of a few bytes takes as long as one of a megabyte.
_SMALL_BYTES = 1 << 20


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

    def target(self, tensor: torch.Tensor) -> torch.Tensor:
        offset = int(tensor.storage_offset()) + self.place.offset
        return tensor.as_strided(self.place.size, self.place.stride, offset)

    def rows(self, columns: int) -> slice | None:
        """Returns which rows of a matrix with that many columns are filled; None if it is not whole rows."""
        begin = self.place.offset
        ends = begin, begin + math.prod(self.place.size)
        (first, before), (last, after) = (divmod(at, columns) for at in ends)
        is_dense = self.place.stride == self.piece.place.stride == contiguous_stride(self.place.size)
        return slice(first, last) if is_dense and before == after == 0 else None


class LayerMap:
    """All copies of a publication into one layer that vLLM quantizes."""

    def __init__(self, layer: nn.Module, fills: Sequence[Fill]):
        self.layer = layer
        self._fills: dict[int, list[Fill]] = defaultdict(list)
        for fill in fills:
            self._fills[fill.piece.bucket].append(fill)
        self._left: set[int] = set()  # buckets that have not arrived; empty if the layer is quantized
        self._quantize, self._expected = row_quantizer(layer), ""
        self._kernel_tensors: dict[str, torch.Tensor] = {}  # empty if vLLM quantizes the layer
        # Of each bucket: the address of its bytes when it was loaded last, and what loads them. Both are kept as in a
        # DirectMap: to make the views takes longer than to use them.
        self._calls: dict[int, tuple[int, list[Callable[[], object]]]] = {}

    @property
    def buckets(self) -> Sequence[int]:
        return list(self._fills)

    def begin(self) -> None:
        self._left = set()

    def load(self, index: int, flat: torch.Tensor) -> None:
        """Copies the layer's part of a bucket, and quantizes the layer with its last part."""
        if self._kernel_tensors:
            address, calls = self._calls.get(index, (0, []))
            if address != flat.data_ptr():
                calls = [self._loader(fill, fill.piece.of(flat)) for fill in self._fills[index]]
                self._calls[index] = flat.data_ptr(), calls
            for call in calls:
                call()
            return
        if not self._left:
            begin_quantizing(self.layer)
            self._left = set(self._fills)
        Copies(self.loaded(index), self.received(index, flat)).run(non_blocking=True)
        self._left.remove(index)
        if not self._left:
            finish_quantizing(self.layer)

    def forget_buffers(self) -> None:
        self._calls.clear()

    def received(self, index: int, flat: torch.Tensor) -> list[torch.Tensor]:
        return [fill.piece.of(flat) for fill in self._fills[index]]

    def loaded(self, index: int) -> list[torch.Tensor]:
        """Returns the layer's tensors that these are copied to, while the layer is not quantized yet."""
        tensors = loaded_tensors(self.layer)
        return [fill.target(tensors[fill.name]) for fill in self._fills[index]]

    def expect_rows(self) -> None:
        """Quantizes the rows of the loaded layer, which vLLM quantizes next, for `take_rows` to compare with."""
        tensors = loaded_tensors(self.layer)
        if self._quantize is None or WEIGHT not in tensors:
            return
        columns = tensors[WEIGHT].shape[-1]
        fills = (fill for fills in self._fills.values() for fill in fills)
        if all(fill.name != WEIGHT or fill.rows(columns) for fill in fills):
            quantized, tensors[SCALE] = self._quantize(tensors[WEIGHT])
            tensors[WEIGHT] = quantized.t()
            self._expected = QuantizedTensors(tensors.items(), quantized.device).digest()

    def take_rows(self) -> None:
        """From here on quantizes rows as they arrive, if vLLM's quantization gave the same bytes."""
        tensors = {name: tensor.detach() for name, tensor in loaded_tensors(self.layer).items()}
        if self._expected and self._expected == QuantizedTensors(tensors.items(), tensors[WEIGHT].device).digest():
            self._kernel_tensors = tensors

    def _loader(self, fill: Fill, received: torch.Tensor) -> Callable[[], object]:
        """Returns what loads `received`: quantizes rows of the weight, or copies another tensor, such as a bias."""
        target = self._kernel_tensors[fill.name]
        rows = fill.rows(target.shape[0]) if fill.name == WEIGHT else None
        if rows is None or self._quantize is None:
            return functools.partial(fill.target(target).copy_, received, non_blocking=True)
        kernel_rows = target.t()[rows], self._kernel_tensors[SCALE][rows]
        return functools.partial(self._quantize, received.view(-1, target.shape[0]), kernel_rows)


class QuantizedTensors:
    """All that a model's quantized layers have for kernels, with the scales, as it is in their memory."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]], device: torch.device):
        self._device, self._names = device, hashlib.blake2b(digest_size=16)
        self._flats: list[torch.Tensor] = []
        self._small: list[torch.Tensor] = []
        self.are_views = True
        """Whether the hash can be computed again after the content has changed."""
        for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
            self._add(name, tensor)

    @classmethod
    def of(cls, model: nn.Module, device: torch.device) -> Self:
        layers = [(name, layer) for name, layer in model.named_modules() if is_quantized(layer)]
        return cls(
            ((f"{name}.{key}", loaded) for name, layer in layers for key, loaded in loaded_tensors(layer).items()),
            device,
        )

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        self._names.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}\n".encode())
        flat = _flat_bytes(tensor)
        self.are_views &= flat.data_ptr() == tensor.data_ptr()
        (self._small if flat.numel() < _SMALL_BYTES else self._flats).append(flat)

    def digest(self) -> str:
        """Returns the hash of the content with names and layouts; "" if no layer is quantized."""
        joined = [torch.cat(self._small)] if self._small else []
        digest, start = WeightDigest("", self._device), 0
        for flat in (*self._flats, *joined):
            start += _update(digest, flat, start)
        if not start:
            return ""
        names = self._names.copy()
        names.update(digest.hexdigest().encode())
        return names.hexdigest()


def _update(digest: WeightDigest, flat: torch.Tensor, start: int) -> int:
    """Adds `flat` to the hash; returns the number of its bytes, with which the hash pads it."""
    missing = -flat.numel() % ALIGN_BYTES
    padded = F.pad(flat, (0, missing)) if missing else flat  # which would copy it also for nothing
    digest.update(padded, start=start)
    return padded.numel()


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the content of a tensor in the order of its memory."""
    axes = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)  # kernels read transposed weights
    return tensor.detach().permute(axes).reshape(-1).view(torch.uint8)
