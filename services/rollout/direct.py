"""Received weights straight to where the engine reads them, once it is known where that is.

vLLM's layerwise reload costs some 0.1 s of Python whatever the model's size. It is watched once: every copy from the
received bytes into an engine's tensor is written down (`Recorder`). If nothing but copies happened, the next reload is
checked against them byte by byte, and from then on they alone are done (`DirectMap`). An engine that processes weights
after loading (quantization, packing, absorbed projections) leaves no such map and keeps the reload.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from services.common.weights.digest import WeightDigest

# Layers whose weights an engine uses as they were loaded.
_PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod")
_PLAIN_ATTENTION = ("Attention",)


@dataclass(frozen=True)
class Piece:
    """A strided part of bucket number `bucket`, in elements of `dtype` from the bucket's begin."""

    bucket: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Copy:
    """`piece` goes into the tensor that begins `offset` elements into `storage`."""

    piece: Piece
    storage: torch.UntypedStorage
    offset: int
    stride: tuple[int, ...]

    def target(self) -> torch.Tensor:
        """The engine's memory."""
        empty = torch.empty(0, dtype=self.piece.dtype, device=self.storage.device)
        return empty.set_(self.storage, self.offset, self.piece.size, self.stride)


class Recorder(TorchDispatchMode):
    """Watches a reload; `copies` is then what a `DirectMap` needs, None if there was more to it than copies."""

    def __init__(self) -> None:
        super().__init__()
        self._buckets: dict[int, int] = {}  # address of received bytes -> number of the bucket
        self._between: dict[int, list[Copy]] = defaultdict(list)  # address of a tensor being loaded -> its pieces
        self._filled: dict[int, int] = defaultdict(int)  # constant elements, such as padding
        self._copies: list[Copy] = []
        self.problem = ""

    def add_bucket(self, index: int, flat: torch.Tensor) -> None:
        """`flat` holds what was received as bucket `index`."""
        self._buckets[flat.untyped_storage().data_ptr()] = index

    @property
    def copies(self) -> list[Copy] | None:
        """All copies from received bytes to the engine's tensors."""
        if self._between:
            self.problem = self.problem or "a weight was loaded but not into the engine"
        return None if self.problem else self._copies

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable and isinstance(args[0], torch.Tensor) and not args[0].is_meta:
            self._see(func, args)
        return result

    def _see(self, func: Any, args: Sequence[Any]) -> None:
        target = args[0]
        address = target.untyped_storage().data_ptr()
        self._buckets.pop(address, None)  # freed since, and allocated again for something else
        if func is torch.ops.aten.copy_.default:
            self._see_copy(target, args[1], address)
        elif func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            self._filled[address] += target.numel()
        elif address in self._between:
            self.problem = self.problem or f"{func} changes a weight after it was loaded"

    def _see_copy(self, target: torch.Tensor, source: torch.Tensor, address: int) -> None:
        source_address = source.untyped_storage().data_ptr()
        if source_address in self._buckets:
            if target.dtype != source.dtype or target.shape != source.shape:
                self.problem = self.problem or f"{tuple(source.shape)} {source.dtype} is converted when loaded"
                return
            place = source.storage_offset(), tuple(source.shape), source.stride()
            piece = Piece(self._buckets[source_address], source.dtype, *place)
            copy = Copy(piece, target.untyped_storage(), target.storage_offset(), target.stride())
            self._between[address].append(copy)
        elif source_address in self._between:
            self._move(target, source, source_address)

    def _move(self, target: torch.Tensor, source: torch.Tensor, address: int) -> None:
        """A loaded weight is copied, whole, to the tensor that kernels read."""
        copies, num_filled = self._between.pop(address), self._filled.pop(address, 0)
        num_known = sum(copy.target().numel() for copy in copies) + num_filled
        if target.stride() != source.stride() or target.dtype != source.dtype or num_known != source.numel():
            self.problem = self.problem or "a weight is rearranged or completed after it was loaded"
            return
        shift = target.storage_offset() - source.storage_offset()
        storage = target.untyped_storage()
        self._copies += [Copy(copy.piece, storage, copy.offset + shift, copy.stride) for copy in copies]


def is_plain(model: nn.Module) -> str:
    """Empty if every layer uses its weights as they were loaded; else what does not."""
    for module in model.modules():
        method = type(getattr(module, "quant_method", None)).__name__
        if method not in (*_PLAIN_METHODS, "NoneType", "BaseKVCacheMethod"):
            return method
        is_attention = "Attention" in type(module).__name__ and hasattr(module, "process_weights_after_loading")
        if is_attention and type(module).__name__ not in _PLAIN_ATTENTION:
            return type(module).__name__
    return ""


class DirectMap:
    """All copies of one publication, made ready: bucket i comes in buffer i % depth."""

    def __init__(self, copies: Sequence[Copy], num_buckets: int, buffers: Sequence[torch.Tensor]):
        self.buffers = buffers
        self._targets: list[list[torch.Tensor]] = [[] for _ in range(num_buckets)]
        self._sources: list[list[torch.Tensor]] = [[] for _ in range(num_buckets)]
        for copy in copies:
            piece = copy.piece
            buffer = buffers[piece.bucket % len(buffers)].view(piece.dtype)
            self._sources[piece.bucket].append(buffer.as_strided(piece.size, piece.stride, piece.offset))
            self._targets[piece.bucket].append(copy.target())

    def load(self, index: int) -> None:
        """From bucket `index`'s buffer into the engine."""
        _copy(self._targets[index], self._sources[index])

    def digest_received(self, digest: WeightDigest, index: int, flat: torch.Tensor, start: int) -> None:
        """Adds what the map takes of a bucket."""
        buffer = self.buffers[index % len(self.buffers)]
        buffer[: flat.numel()].copy_(flat)
        picked = [source.clone() for source in self._sources[index]]
        buffer.zero_()
        _copy(self._sources[index], picked)
        digest.update(buffer[: flat.numel()], start=start)

    def digest_loaded(self, digest: WeightDigest, index: int, num_bytes: int, start: int) -> None:
        """Adds what is in the engine where the map would put a bucket."""
        buffer = self.buffers[index % len(self.buffers)]
        buffer.zero_()
        _copy(self._sources[index], self._targets[index])
        digest.update(buffer[:num_bytes], start=start)


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources), non_blocking=True)
