"""Plans a publication: sender and receivers split the weights into byte buckets by the same rule."""

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from lockstep.types.v1 import types_pb2

from services.common.compat.torch import copy_all
from services.common.errors import InvalidInput
from services.common.weights.span import Items, Source

# Every tensor starts at a multiple of this in its bucket, so that views of any dtype are aligned.
ALIGN_BYTES = 16
# Maximum bytes copied into a bucket by one call. A call per tensor would take longer than the copies themselves, but
# the gathered tensors are kept in memory until the call.
_COPY_BYTES = 64 << 20

T = TypeVar("T")
NamedTensors = Iterable[tuple[str, torch.Tensor]]
# Returns memory for a bucket of so many bytes, or None if any will do.
Buffer = Callable[[int], torch.Tensor | None]


def _any_memory(num_bytes: int) -> None:
    return None


@dataclass(frozen=True)
class Place:
    """Describes the place of one tensor in its bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Bucket:
    """Describes consecutive tensors of one sender, which are sent as one flat uint8 buffer.

    `start` counts bytes from the start of the first bucket; `sender` is a member of the weight group.
    """

    start: int
    num_bytes: int
    places: tuple[Place, ...]
    sender: int


class Plan:
    """Holds the name, dtype and shape of every weight in publication order, and the buckets that follow from them."""

    def __init__(self, message: types_pb2.WeightPlan):
        self.message = message
        self.num_senders = message.num_senders
        self.rounds = tuple(tuple(itertools.chain(*parts)) for parts in take_together(_slots(message)))
        self.buckets = tuple(itertools.chain(*self.rounds))
        self.num_bytes = sum(place.num_bytes for bucket in self.buckets for place in bucket.places)
        self.num_base_buckets = len(self.buckets)
        if self.has_adapter:
            lengths = itertools.accumulate(len(bucket.places) for bucket in self.buckets)
            self.num_base_buckets = sum(length <= message.num_base_tensors for length in lengths)

    @classmethod
    def of(cls, tensors: NamedTensors, *, bucket_bytes: int, slots: Sequence[tuple[int, int]] = ()) -> "Plan":
        """Plans the publication of `tensors`, which may be meta tensors, in their order.

        `slots` lists pairs of a sender and the number of consecutive tensors that it sends.
        """
        message = types_pb2.WeightPlan(tensors=_specs(tensors), bucket_bytes=bucket_bytes)
        message.num_senders = 1 + max((sender for sender, _ in slots), default=0)
        for sender, num_tensors in slots:
            message.slots.add(sender=sender, num_tensors=num_tensors)
        return cls(message)

    @classmethod
    def with_adapter(
        cls, base: NamedTensors, adapter: NamedTensors, *, adapter_config_json: str, bucket_bytes: int
    ) -> "Plan":
        """Plans the publication of a base model and its adapters, whose names are PEFT's."""
        specs = _specs(base)
        return cls(
            types_pb2.WeightPlan(
                tensors=[*specs, *_specs(adapter)],
                bucket_bytes=bucket_bytes,
                num_base_tensors=len(specs),
                adapter_config_json=adapter_config_json,
                num_senders=1,
            )
        )

    @property
    def has_adapter(self) -> bool:
        """Returns whether the plan has adapters, so that a publication may leave the base out."""
        return bool(self.message.adapter_config_json)

    def first_bucket(self, *, skips_base: bool) -> int:
        """Returns the index of the first bucket that a publication sends."""
        return self.num_base_buckets if skips_base else 0

    def num_bytes_sent(self, *, skips_base: bool) -> int:
        """Returns the total size in bytes of the tensors that a publication sends."""
        buckets = self.buckets[self.first_bucket(skips_base=skips_base) :]
        return sum(place.num_bytes for bucket in buckets for place in bucket.places)

    @cached_property
    def digest(self) -> str:
        """Returns a 128-bit hash, in hexadecimal, of names, dtypes, shapes and adapter config, but not bucket sizes."""
        hasher = hashlib.blake2b(digest_size=16)
        for spec in self.message.tensors:
            hasher.update(f"{spec.name} {spec.dtype} {list(spec.shape)}\n".encode())
        hasher.update(self.message.adapter_config_json.encode())
        return hasher.hexdigest()


def take_together(slots: Iterable[tuple[int, T]]) -> Iterator[list[T]]:
    """Groups slots into rounds: consecutive slots of different senders, which can gather at the same time."""
    senders: set[int] = set()
    together: list[T] = []
    for sender, held in slots:
        if sender in senders:
            yield together
            senders, together = set(), []
        senders.add(sender)
        together.append(held)
    if together:
        yield together


def pack(
    plan: Plan, tensors: Items, device: torch.device, *, skips_base: bool = False, buffer: Buffer = _any_memory
) -> Iterator[tuple[Bucket, torch.Tensor]]:
    """Yields each bucket with its bytes (uint8 [num_bytes]), filled from `tensors`, which must be in plan order.

    They are packed into what `buffer` returns for their number, or into new memory if it returns None. A tensor that is
    alone in its bucket is not copied if its bytes can be sent as they are. With `skips_base`, `tensors` and the buckets
    are those of the adapter only.

    Raises:
        InternalError: A tensor differs from the plan's tensor at its place, or comes after the end of the plan.
    """
    source = Source(tensors)
    for bucket in plan.buckets[plan.first_bucket(skips_base=skips_base) :]:
        yield bucket, _filled(bucket, source, device, buffer)
    source.end()


def follow(plan: Plan, tensors: NamedTensors, *, skips_base: bool = False) -> Iterator[tuple[Bucket, None]]:
    """Takes tensors at the same points as `pack` does on the sender, but packs nothing. Taking them runs collectives of
    the ranks, which thus have the same order on all ranks relative to the caller's own collectives.
    """
    source = iter(tensors)
    for bucket in plan.buckets[plan.first_bucket(skips_base=skips_base) :]:
        for _ in bucket.places:
            next(source, None)
        yield bucket, None
    for _ in source:
        pass


def pack_rounds(
    plan: Plan, rounds: Iterable[Items], device: torch.device, *, sender: int
) -> Iterator[tuple[Bucket, torch.Tensor | None]]:
    """Packs like `pack` for one of several senders; `rounds` has its tensors of each round.

    The buckets of other senders come without a buffer. All tensors of a round are taken before its first bucket is
    yielded, so that all members start gathers and broadcasts in the same order. Otherwise a broadcast could wait for
    something that a member does only after that broadcast.

    Raises:
        InternalError: As in `pack`.
    """
    for buckets, tensors in zip(plan.rounds, rounds, strict=True):
        source = Source(tensors)
        flats = [_filled(bucket, source, device) if bucket.sender == sender else None for bucket in buckets]
        source.end()
        for bucket in buckets:
            yield bucket, flats.pop(0)


def unpack(bucket: Bucket, flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields a view of `flat` (uint8 [num_bytes]) for each tensor of the bucket, with its name."""
    typed, begin = _typed(bucket, flat), int(flat.storage_offset())
    for place in bucket.places:
        # One call instead of three (a slice and two views), because a large mixture of experts has 20,000 tensors.
        start = (begin + place.offset) // place.dtype.itemsize
        yield place.name, typed[place.dtype].as_strided(place.shape, place.stride, start)


def _filled(bucket: Bucket, source: Source, device: torch.device, buffer: Buffer = _any_memory) -> torch.Tensor:
    places = bucket.places
    num, tensor = source.take(places, 0)
    if len(places) == 1 and tensor.device == device and _is_flat(tensor):
        return tensor.detach().view(-1).view(torch.uint8)
    flat = buffer(bucket.num_bytes)
    if flat is None:
        flat = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=device)
    _clear_gaps(bucket, flat)
    typed = _typed(bucket, flat)
    targets: list[torch.Tensor] = []
    tensors: list[torch.Tensor] = []
    done = num_bytes = 0
    while True:
        targets.append(_target(typed, int(flat.storage_offset()), places[done], tensor))
        tensors.append(tensor)
        done, num_bytes = done + num, num_bytes + tensor.nbytes
        del tensor  # taking the next one may gather it, which needs memory
        if num_bytes > _COPY_BYTES or done == len(places):
            with torch.no_grad():
                copy_all(targets, tensors)
            targets, tensors, num_bytes = [], [], 0
        if done == len(places):
            return flat
        num, tensor = source.take(places, done)


def _typed(bucket: Bucket, flat: torch.Tensor) -> dict[torch.dtype, torch.Tensor]:
    return {dtype: flat.view(dtype) for dtype in {place.dtype for place in bucket.places}}


def _target(typed: dict[torch.dtype, torch.Tensor], begin: int, place: Place, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of the bucket, whose memory begins at byte `begin` of its storage, that has the tensor's shape."""
    shape, stride = place.shape, place.stride
    if tensor.shape != shape:  # the numbers of several tensors
        shape, stride = tuple(tensor.shape), (1,)
    return typed[place.dtype].as_strided(shape, stride, (begin + place.offset) // place.dtype.itemsize)


def _clear_gaps(bucket: Bucket, flat: torch.Tensor) -> None:
    """Sets the bytes between tensors to 0, because they are hashed too."""
    for place in bucket.places:
        end = place.offset + place.num_bytes
        if gap := -end % ALIGN_BYTES:
            flat[end : end + gap].zero_()


def _is_flat(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor's bytes can be a bucket without a copy: contiguous and in whole aligned words."""
    sizes = tensor.storage_offset() * tensor.element_size(), tensor.numel() * tensor.element_size()
    return tensor.is_contiguous() and not any(size % ALIGN_BYTES for size in sizes)


def _specs(tensors: NamedTensors) -> list[types_pb2.TensorSpec]:
    return [
        types_pb2.TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tensor.shape)
        for name, tensor in tensors
    ]


def _slots(message: types_pb2.WeightPlan) -> Iterator[tuple[int, list[Bucket]]]:
    """Yields each slot's sender and buckets. If there is only one sender, each bucket is a slot."""
    specs, start = iter(message.tensors), 0
    for sender, num_tensors in _parts(message):
        buckets = list(_cut(itertools.islice(specs, num_tensors), message.bucket_bytes, start, sender))
        yield from [(sender, buckets)] if message.num_senders > 1 else [(sender, [bucket]) for bucket in buckets]
        start += sum(bucket.num_bytes for bucket in buckets)


def _parts(message: types_pb2.WeightPlan) -> list[tuple[int, int]]:
    """Returns each part's sender and number of tensors. Adapters are a part of their own, so they start a bucket."""
    base = message.num_base_tensors if message.adapter_config_json else 0
    parts = [(slot.sender, slot.num_tensors) for slot in message.slots]
    parts = parts or [(0, base), (0, len(message.tensors) - base)]
    if any(sender >= message.num_senders for sender, _ in parts):
        raise InvalidInput(
            f"plan: a slot names a sender that is not one of the {message.num_senders} senders", field="plan"
        )
    if sum(num_tensors for _, num_tensors in parts) != len(message.tensors):
        raise InvalidInput(f"plan: the slots do not add up to its {len(message.tensors)} tensors", field="plan")
    return parts


def _cut(specs: Iterable[types_pb2.TensorSpec], bucket_bytes: int, start: int, sender: int) -> Iterator[Bucket]:
    places: list[Place] = []
    offset = 0
    for spec in specs:
        dtype = getattr(torch, spec.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise InvalidInput(f"plan: {spec.name} has unknown dtype {spec.dtype!r}", field="plan")
        shape = tuple(spec.shape)
        num_bytes = math.prod(shape) * dtype.itemsize
        if places and offset + num_bytes > bucket_bytes:
            yield Bucket(start, offset, tuple(places), sender)
            start, offset, places = start + offset, 0, []
        stride = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        places.append(Place(spec.name, dtype, shape, stride, offset, num_bytes))
        offset += num_bytes + -num_bytes % ALIGN_BYTES
    if places:
        yield Bucket(start, offset, tuple(places), sender)
