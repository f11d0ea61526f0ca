"""Received weights straight to where the engine reads them, once it is known where that is.

vLLM's layerwise reload costs some 0.1 s of Python whatever the model's size. It is watched once: every copy from the
received bytes into an engine's tensor is written down (`Recorder`). If nothing but copies happened, the next reload is
checked against them byte by byte, and from then on they alone are done (`DirectMap`). An engine that processes weights
after loading (quantization, packing, absorbed projections) leaves no such map and keeps the reload.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from services.common.compat.torch import copy_all
from services.common.weights.digest import WeightDigest
from services.common.weights.plan import ALIGN_BYTES
from services.rollout.compat.torch import OperatorWatch, writes_input


class Place(NamedTuple):
    """A strided part of a storage, in elements."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A part of bucket number `bucket`, in elements of `dtype` from the bucket's begin."""

    bucket: int
    dtype: torch.dtype
    place: Place


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
        return empty.set_(self.storage, self.offset, self.piece.place.size, self.stride)


class Recorder(OperatorWatch):
    """Watches a reload; `copies` is then what a `DirectMap` needs, None if there was more to it than copies.

    Storages are known by their addresses: an operator that returns new memory makes what was known of it void.
    `engine` has the tensors that the engine reads.
    """

    def __init__(self, engine: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._engine = set(map(_address, engine))
        self._buckets: dict[int, int] = {}  # address of received bytes -> number of the bucket
        # Address of a tensor being loaded -> what its parts got; None: a constant, such as padding.
        self._between: dict[int, dict[Place, Copy | None]] = defaultdict(dict)
        self._done: set[int] = set()  # addresses of loaded tensors, the engine's among them
        self._copies: list[Copy] = []
        self.problem = ""

    def add_bucket(self, index: int, flat: torch.Tensor) -> None:
        """`flat` holds what was received as bucket `index`."""
        self._buckets[_address(flat)] = index

    @property
    def copies(self) -> list[Copy] | None:
        """All copies from received bytes to the engine's tensors."""
        if any(map(self._is_loading, self._between)):
            self._refuse("a weight was loaded but not into the engine")
        return None if self.problem else self._copies

    def see(self, func: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Takes note of what an operator copied or computed."""
        if outputs and all(output.is_meta for output in outputs):  # vLLM counts elements on meta tensors
            return
        inputs = [tensor for tensor in inputs if not tensor.is_meta]
        known = {_address(tensor) for tensor in inputs}
        new = {_address(tensor) for tensor in outputs} - known
        is_view = outputs and not new and not writes_input(func)
        if func is torch.ops.aten.copy_.default:
            self._see_copy(*inputs)
        elif func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            self._between[_address(inputs[0])][_place(inputs[0])] = None
        elif not is_view and any(map(self._is_weight, known)):
            self._refuse(f"{func} computes with a weight")
        for address in new:
            self._forget(address)

    def _see_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        address, source_address = _address(target), _address(source)
        if address == source_address and _place(target) == _place(source) and address not in self._engine:
            return  # onto itself, before it comes to the engine, as vLLM does with experts
        if source_address in self._buckets:
            if target.dtype != source.dtype or target.shape != source.shape:
                self._refuse(f"{tuple(source.shape)} {source.dtype} is converted when loaded")
            piece = Piece(self._buckets[source_address], source.dtype, _place(source))
            copy = Copy(piece, target.untyped_storage(), target.storage_offset(), target.stride())
            # The same place again counts once: vLLM loads a bias twice.
            self._between[address][_place(target)] = copy
        elif self._is_loading(source_address):
            self._move(target, source)
        elif self._is_weight(address) or self._is_weight(source_address):
            self._refuse("a loaded weight is written or read again")

    def _move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """A loaded weight is copied, whole, to the tensor that kernels read."""
        parts = self._between.pop(_address(source))
        num_known = sum(math.prod(place.size) for place in parts)
        if target.stride() != source.stride() or target.dtype != source.dtype or num_known != source.numel():
            self._refuse("a weight is rearranged or completed after it was loaded")
        shift, storage = target.storage_offset() - source.storage_offset(), target.untyped_storage()
        moved = (copy for copy in parts.values() if copy)
        self._copies += [Copy(copy.piece, storage, copy.offset + shift, copy.stride) for copy in moved]
        self._done |= {_address(target), _address(source)}

    def _is_loading(self, address: int) -> bool:
        return any(self._between.get(address, {}).values())

    def _is_weight(self, address: int) -> bool:
        return address in self._buckets or address in self._done or self._is_loading(address)

    def _forget(self, address: int) -> None:
        """What was here is freed, and the memory is used for something else."""
        self._buckets.pop(address, None)
        self._done.discard(address)
        self._between.pop(address, None)  # nothing but constants: a copy keeps its storage

    def _refuse(self, problem: str) -> None:
        self.problem = self.problem or problem


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _place(tensor: torch.Tensor) -> Place:
    return Place(tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


class DirectMap:
    """All copies of one publication, made ready: bucket i comes in buffer i % depth."""

    def __init__(self, copies: Sequence[Copy], num_buckets: int, buffers: Sequence[torch.Tensor]):
        self.buffers = buffers
        self._targets: list[list[torch.Tensor]] = [[] for _ in range(num_buckets)]
        self._sources: list[list[torch.Tensor]] = [[] for _ in range(num_buckets)]
        for copy in copies:
            piece, place = copy.piece, copy.piece.place
            buffer = buffers[piece.bucket % len(buffers)].view(piece.dtype)
            self._sources[piece.bucket].append(buffer.as_strided(place.size, place.stride, place.offset))
            self._targets[piece.bucket].append(copy.target())

    def load(self, index: int) -> None:
        """From bucket `index`'s buffer into the engine."""
        if self._targets[index]:
            copy_all(self._targets[index], self._sources[index], non_blocking=True)

    def digest_received(self, digest: WeightDigest, index: int, flat: torch.Tensor, start: int) -> None:
        """Adds what the map takes of a bucket."""
        self.buffers[index % len(self.buffers)][: flat.numel()].copy_(flat)
        _add(digest, self._sources[index], start)

    def digest_loaded(self, digest: WeightDigest, index: int, start: int) -> None:
        """Adds what is in the engine where the map would put a bucket."""
        _add(digest, self._targets[index], start)


def _add(digest: WeightDigest, tensors: Sequence[torch.Tensor], start: int) -> None:
    if tensors:
        flats = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
        digest.update(torch.cat([F.pad(flat, (0, -flat.numel() % ALIGN_BYTES)) for flat in flats]), start=start)
