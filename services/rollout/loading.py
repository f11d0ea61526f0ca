"""Loads received buckets into the engine: first by a recorded reload, then by a checked one, then by direct copies.

vLLM's layerwise reload takes about 0.1 s of Python, regardless of the model's size. During the first reload, every copy
from received bytes to a tensor of the engine is recorded (`Recorder`). If the reload did nothing but copy, the next one
is compared with the recorded copies byte by byte. From the third publication on, only these copies are made
(`DirectMap`). If the engine quantizes a layer, they go to its parameters before that (services.rollout.quantizing). If
an engine processes weights after loading in another way (packing, absorbed projections), it keeps using the reload.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from vllm.config import ModelConfig

from services.common.compat.torch import Copies, OperatorWatch, OpOverload, writes_input
from services.common.weights.buckets import WeightDigest, unpack
from services.common.weights.plan import ALIGN_BYTES, Bucket, Plan, contiguous_stride
from services.rollout.compat.worker import abort_reload, before_quantizing, loaded_tensors, not_plain, reload_weights
from services.rollout.quantizing import Fill, LayerMap, Piece, Place, QuantizedTensors

log = logging.getLogger(__name__)

# Parts of layers are hashed at places that are this far from each other, behind those of all buckets.
_PART_BYTES = 1 << 36


@dataclass(frozen=True)
class Copy:
    """A copy of `piece` to the tensor that starts at element `offset` of `storage`."""

    piece: Piece
    storage: torch.UntypedStorage
    offset: int
    stride: tuple[int, ...]

    def target(self) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.piece.dtype, device=self.storage.device)
        return empty.set_(self.storage, self.offset, self.piece.place.size, self.stride)


class Recorder(OperatorWatch):
    """Records a reload. Afterwards `copies` is what a `DirectMap` needs, or None if the reload did more than copy.

    Storages are identified by their addresses, so an operator that returns new memory invalidates what was recorded for
    that address. `engine` has the tensors that the engine reads.
    """

    def __init__(self, engine: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._engine = set(map(_address, engine))
        self._buckets: dict[int, int] = {}  # address of received bytes -> index of the bucket
        # Address of a tensor being loaded -> its parts and where they came from; None is a constant, such as padding.
        self._between: dict[int, dict[Place, Copy | None]] = defaultdict(dict)
        self._done: set[int] = set()  # addresses of loaded tensors, including the engine's
        self._copies: list[Copy] = []
        self.layers: list[LayerMap] = []
        """The copies into layers that are quantized."""
        self.problem = ""

    def add_bucket(self, index: int, flat: torch.Tensor) -> None:
        self._buckets[_address(flat)] = index

    def see_quantizing(self, layer: nn.Module) -> None:
        """Records what was copied to a layer that is quantized next. From here on its tensors are no weights."""
        fills: list[Fill] = []
        for name, tensor in loaded_tensors(layer).items():
            copies = [copy for copy in self._between.pop(_address(tensor), {}).values() if copy]
            if sum(math.prod(copy.piece.place.size) for copy in copies) != tensor.numel():
                self._refuse(f"{name} of a layer is completed after it was loaded")
            begin = _offset(tensor)
            fills += [
                Fill(copy.piece, name, Place(copy.offset - begin, copy.piece.place.size, copy.stride))
                for copy in _joined(copies)
            ]
        self.layers.append(LayerMap(layer, fills))

    @property
    def copies(self) -> list[Copy] | None:
        if any(map(self._is_loading, self._between)):
            self._refuse("a weight was loaded but not into the engine")
        return None if self.problem else self._copies

    def see(self, func: OpOverload, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Records what an operator copied, or that it computed with a weight."""
        if outputs and all(output.is_meta for output in outputs):  # vLLM counts elements on meta tensors
            return
        inputs = [tensor for tensor in inputs if not tensor.is_meta]
        known = {_address(tensor) for tensor in inputs}
        new = {_address(tensor) for tensor in outputs} - known
        is_view = outputs and not new and not writes_input(func)
        if func is torch.ops.aten.copy_.default:
            self._see_copy(*inputs)
        elif func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            self._between[_address(inputs[0])][_place_of(inputs[0])] = None
        elif not is_view and any(map(self._is_weight, known)):
            self._refuse(f"{func} computes with a weight")
        for address in new:
            self._forget(address)

    def _see_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        address, source_address = _address(target), _address(source)
        if address == source_address and _place_of(target) == _place_of(source) and address not in self._engine:
            return  # a copy onto itself before the weight reaches the engine, which vLLM makes for experts
        if source_address in self._buckets:
            if target.dtype != source.dtype or target.shape != source.shape:
                self._refuse(f"{tuple(source.shape)} {source.dtype} is converted when loaded")
            piece = Piece(self._buckets[source_address], source.dtype, _place_of(source))
            copy = Copy(piece, target.untyped_storage(), _offset(target), target.stride())
            # A second copy to the same place replaces the first, because vLLM loads a bias twice.
            self._between[address][_place_of(target)] = copy
        elif self._is_loading(source_address):
            self._move(target, source)
        elif self._is_weight(address) or self._is_weight(source_address):
            self._refuse("a loaded weight is written or read again")

    def _move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Records that a whole loaded weight is copied to the tensor that kernels read."""
        parts = self._between.pop(_address(source))
        num_known = sum(math.prod(place.size) for place in parts)
        if target.stride() != source.stride() or target.dtype != source.dtype or num_known != source.numel():
            self._refuse("a weight is rearranged or completed after it was loaded")
        shift, storage = _offset(target) - _offset(source), target.untyped_storage()
        moved = (copy for copy in parts.values() if copy)
        self._copies += [Copy(copy.piece, storage, copy.offset + shift, copy.stride) for copy in moved]
        self._done |= {_address(target), _address(source)}

    def _is_loading(self, address: int) -> bool:
        return any(self._between.get(address, {}).values())

    def _is_weight(self, address: int) -> bool:
        return address in self._buckets or address in self._done or self._is_loading(address)

    def _forget(self, address: int) -> None:
        """Drops the record of an address with memory that was freed and is now used for something else."""
        self._buckets.pop(address, None)
        self._done.discard(address)
        self._between.pop(address, None)  # can only have constants, because a Copy keeps its storage alive

    def _refuse(self, problem: str) -> None:
        self.problem = self.problem or problem


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _offset(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset())


def _place_of(tensor: torch.Tensor) -> Place:
    return Place(_offset(tensor), tuple(tensor.shape), tensor.stride())


class DirectMap:
    """All copies of a publication, ready to run."""

    def __init__(self, copies: Sequence[Copy], num_buckets: int, layers: Sequence[LayerMap] = ()):
        self.layers = layers
        """The layers that are quantized."""
        self.layers_of: list[list[LayerMap]] = [[] for _ in range(num_buckets)]
        """Those of which each bucket has a part."""
        for layer in layers:
            for index in layer.buckets:
                self.layers_of[index].append(layer)
        self._pieces: list[list[Piece]] = [[] for _ in range(num_buckets)]
        self._targets: list[list[torch.Tensor]] = [[] for _ in range(num_buckets)]
        # Of each bucket: the address of its bytes when it was loaded last, and the copies from views of them. Both are
        # kept because a large mixture of experts has 20,000 copies, and buckets arrive in the same few buffers.
        self._copies: dict[int, tuple[int, Copies]] = {}
        for copy in _joined(copies):
            self._pieces[copy.piece.bucket].append(copy.piece)
            self._targets[copy.piece.bucket].append(copy.target())

    def load(self, index: int, flat: torch.Tensor) -> None:
        """Copies bucket `index` from its bytes (uint8 [num_bytes]) into the engine."""
        for layer in self.layers_of[index]:
            layer.load(index, flat)
        if not self._targets[index]:
            return
        address, copies = self._copies.get(index, (0, None))
        if copies is None or address != flat.data_ptr():
            copies = Copies(self._targets[index], self.received(index, flat))
            self._copies[index] = flat.data_ptr(), copies
        copies.run(non_blocking=True)

    def begin(self) -> None:
        """Forgets a publication that broke off."""
        for layer in self.layers:
            layer.begin()

    def starts(self, part_bytes: int) -> dict[tuple[LayerMap, int], int]:
        """Returns a place in a hash for each layer's part of each bucket."""
        parts = [(layer, index) for index, layers in enumerate(self.layers_of) for layer in layers]
        return {part: number * part_bytes for number, part in enumerate(parts, 1)}

    def forget_buffers(self) -> None:
        """Drops the views of the memory that buckets arrived in."""
        self._copies.clear()
        for layer in self.layers:
            layer.forget_buffers()

    def received(self, index: int, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns the parts of a received bucket that the map copies, as views."""
        return [piece.of(flat) for piece in self._pieces[index]]

    def loaded(self, index: int) -> list[torch.Tensor]:
        """Returns the engine's tensors that the map copies a bucket to, in the order of `received`."""
        return self._targets[index]


def _joined(copies: Sequence[Copy]) -> list[Copy]:
    """Joins copies of whole neighbors to whole neighbors, such as the experts of a layer."""
    joined: list[Copy] = []
    for copy in copies:
        if joined and (both := _as_one(joined[-1], copy)):
            joined[-1] = both
        else:
            joined.append(copy)
    return joined


def _as_one(first: Copy, second: Copy) -> Copy | None:
    """Returns the copy that does both; None if they are not neighbors in the bucket and in the engine's memory."""
    pieces = first.piece, second.piece
    sizes = [math.prod(piece.place.size) for piece in pieces]
    if (
        (pieces[0].bucket, pieces[0].dtype, first.storage.data_ptr())
        != (pieces[1].bucket, pieces[1].dtype, second.storage.data_ptr())
        or not all(_is_whole(copy) for copy in (first, second))
        or pieces[0].place.offset + sizes[0] != pieces[1].place.offset
        or first.offset + sizes[0] != second.offset
    ):
        return None
    place = Place(pieces[0].place.offset, (sum(sizes),), (1,))
    return Copy(Piece(pieces[0].bucket, pieces[0].dtype, place), first.storage, first.offset, (1,))


def _is_whole(copy: Copy) -> bool:
    """Returns whether the numbers of a copy follow one another in the bucket and in the engine's memory."""
    return copy.piece.place.stride == copy.stride == contiguous_stride(copy.piece.place.size)


def _add(digest: WeightDigest, tensors: Sequence[torch.Tensor], start: int) -> None:
    if tensors:
        flats = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
        digest.update(torch.cat([F.pad(flat, (0, -flat.numel() % ALIGN_BYTES)) for flat in flats]), start=start)


# (index of the bucket, bucket, its bytes), in the order of arrival.
Arrivals = Iterator[tuple[int, Bucket, torch.Tensor]]


class Loading:
    """Loads publications of one plan into one engine worker. Call `load` once for every publication."""

    def __init__(self, model: nn.Module, model_config: ModelConfig, plan: Plan, device: torch.device):
        self._model, self._model_config, self._device = model, model_config, device
        self._plan = plan
        self._map: DirectMap | None = None
        self._is_checked = False
        self._problem = not_plain(model)
        self._quantized: QuantizedTensors | None = None

    @property
    def reads_in_place(self) -> bool:
        """Returns whether a bucket is read at once. Otherwise each needs new memory, because vLLM keeps parts of it."""
        return self._map is not None and self._is_checked

    def forget_buffers(self) -> None:
        """Keeps nothing of the memory that buckets arrived in."""
        if self._map:
            self._map.forget_buffers()

    def load(self, arrivals: Arrivals) -> None:
        """Loads one publication and waits for the device."""
        if self._map and self._is_checked:
            for index, _, flat in arrivals:
                self._map.load(index, flat)
        elif self._map:
            self._reload_and_check(self._map, arrivals)
        elif self._problem:
            self._reload(arrivals)
        else:
            self._reload_and_watch(arrivals)
        if self._device.type != "cpu":
            torch.accelerator.synchronize()

    def quantized_digest(self) -> str:
        """Returns the hash of what is loaded in the layers that the engine quantizes; "" if there are none."""
        quantized = self._quantized or QuantizedTensors.of(self._model, self._device)
        # Direct copies rely on the engine's addresses too.
        self._quantized = quantized if self.reads_in_place and quantized.are_views else None
        return quantized.digest()

    def abort(self) -> None:
        """Makes the engine reloadable again after an incomplete publication."""
        abort_reload(self._model)
        if not self._is_checked:
            self._map = None
        elif self._map:
            self._map.begin()

    def _reload(self, arrivals: Arrivals, see: Callable[[int, Bucket, torch.Tensor], None] | None = None) -> None:
        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for index, bucket, flat in arrivals:
                if see:
                    see(index, bucket, flat)
                yield from unpack(bucket, flat)

        reload_weights(self._model, self._model_config, weights())

    def _reload_and_watch(self, arrivals: Arrivals) -> None:
        recorder = Recorder([*self._model.parameters(), *self._model.buffers()])
        with recorder, before_quantizing(self._model, recorder.see_quantizing):
            self._reload(arrivals, lambda index, _, flat: recorder.add_bucket(index, flat))
        if recorder.copies is None:
            self._give_up(recorder.problem)
            return
        self._map = DirectMap(recorder.copies, len(self._plan.buckets), recorder.layers)

    def _reload_and_check(self, direct: DirectMap, arrivals: Arrivals) -> None:
        received, loaded = WeightDigest("", self._device), WeightDigest("", self._device)
        starts = direct.starts(_PART_BYTES)

        def see(index: int, bucket: Bucket, flat: torch.Tensor) -> None:
            # What has arrived is hashed at once, because its memory may be gone when all is loaded.
            _add(received, direct.received(index, flat), bucket.start)
            for layer in direct.layers_of[index]:
                _add(received, layer.received(index, flat), starts[layer, index])

        def see_quantizing(layer: nn.Module) -> None:
            (known,) = (known for known in direct.layers if known.layer is layer)
            known.expect_rows()
            for index in known.buckets:
                _add(loaded, known.loaded(index), starts[known, index])

        with before_quantizing(self._model, see_quantizing):
            self._reload(arrivals, see)
        # Only now, because a tensor has its content when vLLM has finished the layer.
        for index, bucket in enumerate(self._plan.buckets):
            _add(loaded, direct.loaded(index), bucket.start)
        self._is_checked = loaded.hexdigest() == received.hexdigest()
        if not self._is_checked:
            self._give_up("the reload wrote other bytes than the recorded copies would")
            return
        for layer in direct.layers:
            layer.take_rows()

    def _give_up(self, problem: str) -> None:
        self._problem, self._map = problem, None
        log.info("publications use vLLM's slower reload: %s", problem)
