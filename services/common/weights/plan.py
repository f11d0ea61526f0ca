"""What a publication sends, cut into byte buckets by the same rule on both ends."""

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from lockstep.types.v1 import types_pb2

from services.common.errors import InternalError, InvalidInput

# Every tensor starts at a multiple of this, so that views of any dtype are aligned.
ALIGN_BYTES = 16
# Copied into a bucket in one call: one for each tensor would take longer than the copies, and what was gathered for
# them is held until then.
_COPY_BYTES = 64 << 20

NamedTensors = Iterable[tuple[str, torch.Tensor | None]]
"""None: another member sends it."""
_NOTHING = ("nothing", torch.empty(0))


@dataclass(frozen=True)
class Slot:
    """Place of one tensor in its bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Bucket:
    """Consecutive tensors of one sender, which travel as one flat uint8 buffer.

    `start` counts bytes from the first bucket's begin, `sender` is a member of the weight group.
    """

    start: int
    num_bytes: int
    slots: tuple[Slot, ...]
    sender: int


class Plan:
    """Name, dtype and shape of every weight in publication order, and the buckets that follow from them."""

    def __init__(self, message: types_pb2.WeightPlan):
        self.message = message
        self.buckets = tuple(_cut(message))
        self.num_senders = message.num_senders
        if any(bucket.sender >= self.num_senders for bucket in self.buckets):
            raise InvalidInput(f"plan: a tensor's sender is none of its {self.num_senders} senders", field="plan")
        self.num_bytes = sum(slot.num_bytes for bucket in self.buckets for slot in bucket.slots)
        self.num_base_buckets = len(self.buckets)
        if self.has_adapter:
            lengths = itertools.accumulate(len(bucket.slots) for bucket in self.buckets)
            self.num_base_buckets = sum(length <= message.num_base_tensors for length in lengths)

    @classmethod
    def of(cls, tensors: NamedTensors, *, bucket_bytes: int, senders: Sequence[int] = ()) -> "Plan":
        """The plan of `tensors` (meta tensors will do) in their order; `senders` is of each, without it all are 0."""
        specs = _specs(tensors)
        for spec, sender in zip(specs, senders, strict=bool(senders)):
            spec.sender = sender
        num_senders = 1 + max(senders, default=0)
        return cls(types_pb2.WeightPlan(tensors=specs, bucket_bytes=bucket_bytes, num_senders=num_senders))

    @classmethod
    def with_adapter(
        cls, base: NamedTensors, adapter: NamedTensors, *, adapter_config_json: str, bucket_bytes: int
    ) -> "Plan":
        """The plan of a base and, in PEFT's names, of the adapters beside it."""
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
        """Whether the base may be left out of a publication."""
        return bool(self.message.adapter_config_json)

    def first_bucket(self, *, skips_base: bool) -> int:
        """Where a publication begins."""
        return self.num_base_buckets if skips_base else 0

    def num_bytes_sent(self, *, skips_base: bool) -> int:
        """Of the tensors of a publication."""
        buckets = self.buckets[self.first_bucket(skips_base=skips_base) :]
        return sum(slot.num_bytes for bucket in buckets for slot in bucket.slots)

    @cached_property
    def digest(self) -> str:
        """128-bit hash, in hexadecimal, of names, dtypes, shapes and adapter config, whatever the bucket size."""
        hasher = hashlib.blake2b(digest_size=16)
        for spec in self.message.tensors:
            hasher.update(f"{spec.name} {spec.dtype} {list(spec.shape)}\n".encode())
        hasher.update(self.message.adapter_config_json.encode())
        return hasher.hexdigest()


def pack(
    plan: Plan, tensors: NamedTensors, device: torch.device, *, skips_base: bool = False, sender: int = 0
) -> Iterator[tuple[Bucket, torch.Tensor | None]]:
    """Fills one new buffer (uint8 [num_bytes]) after the other from `tensors`, which must come in the plan's order.

    A large tensor that has a bucket for itself is not copied.

    With `skips_base`, tensors and buckets are the adapter's only. A bucket of another sender than `sender` comes, when
    its tensors have gone by, without a buffer.

    Raises:
        InternalError: A tensor is not the one that the plan has at its place, or comes after its end.
    """
    source = iter(tensors)
    for bucket in plan.buckets[plan.first_bucket(skips_base=skips_base) :]:
        if bucket.sender == sender:
            yield bucket, _filled(bucket, source, device)
        else:
            _let_pass(bucket, source)
            yield bucket, None
    for name, _ in source:
        raise InternalError(f"export order changed: the plan ends before {name}")


def unpack(bucket: Bucket, flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of `flat` (uint8 [num_bytes]), one for each tensor of the bucket."""
    typed = {dtype: flat.view(dtype) for dtype in {slot.dtype for slot in bucket.slots}}
    begin = flat.storage_offset()
    for slot in bucket.slots:
        # One call where a slice and two views would be three: a large model of experts has 20,000 tensors.
        place = (begin + slot.offset) // slot.dtype.itemsize
        yield slot.name, typed[slot.dtype].as_strided(slot.shape, slot.stride, place)


def _filled(bucket: Bucket, source: Iterator[tuple[str, torch.Tensor | None]], device: torch.device) -> torch.Tensor:
    if len(bucket.slots) == 1:
        tensor = _checked(bucket.slots[0], *next(source, _NOTHING))
        if tensor.device == device and _is_flat(tensor):
            return tensor.detach().view(-1).view(torch.uint8)
        source = iter([(bucket.slots[0].name, tensor)])
    flat = torch.zeros(bucket.num_bytes, dtype=torch.uint8, device=device)
    views: list[torch.Tensor] = []
    tensors: list[torch.Tensor] = []
    num_bytes = 0
    for slot, (_, view) in zip(bucket.slots, unpack(bucket, flat), strict=True):
        views.append(view)
        tensors.append(_checked(slot, *next(source, _NOTHING)))
        num_bytes += slot.num_bytes
        if num_bytes > _COPY_BYTES or slot is bucket.slots[-1]:
            with torch.no_grad():
                torch._foreach_copy_(views, tensors)
            views, tensors, num_bytes = [], [], 0
    return flat


def _is_flat(tensor: torch.Tensor) -> bool:
    """Whether its bytes are a bucket's, of whole aligned words."""
    sizes = tensor.storage_offset() * tensor.element_size(), tensor.numel() * tensor.element_size()
    return tensor.is_contiguous() and not any(size % ALIGN_BYTES for size in sizes)


def _let_pass(bucket: Bucket, source: Iterator[tuple[str, torch.Tensor | None]]) -> None:
    for slot in bucket.slots:
        name, _ = next(source, _NOTHING)
        if name != slot.name:
            raise InternalError(f"export order changed: the plan has {slot.name}, got {name}")


def _checked(slot: Slot, name: str, tensor: torch.Tensor | None) -> torch.Tensor:
    """`tensor`, which is what the plan has in the slot."""
    if tensor is None:
        raise InternalError(f"{slot.name} is this sender's in the plan, and it was not given")
    if (name, tensor.dtype, tuple(tensor.shape)) != (slot.name, slot.dtype, slot.shape):
        raise InternalError(
            f"export order changed: the plan has {slot.name} {slot.dtype} {slot.shape}, "
            f"got {name} {tensor.dtype} {tuple(tensor.shape)}"
        )
    return tensor


def _specs(tensors: NamedTensors) -> list[types_pb2.TensorSpec]:
    return [
        types_pb2.TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tensor.shape)
        for name, tensor in tensors
    ]


def _cut(message: types_pb2.WeightPlan) -> Iterator[Bucket]:
    slots: list[Slot] = []
    start = offset = sender = 0
    for index, spec in enumerate(message.tensors):
        dtype = getattr(torch, spec.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise InvalidInput(f"plan: {spec.name} has unknown dtype {spec.dtype!r}", field="plan")
        num_bytes = math.prod(spec.shape) * dtype.itemsize
        is_first_of_adapter = message.adapter_config_json and index == message.num_base_tensors
        is_first_of_sender = spec.sender != sender
        if slots and (is_first_of_adapter or is_first_of_sender or offset + num_bytes > message.bucket_bytes):
            yield Bucket(start, offset, tuple(slots), sender)
            start, offset, slots = start + offset, 0, []
        shape, sender = tuple(spec.shape), spec.sender
        stride = tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
        slots.append(Slot(spec.name, dtype, shape, stride, offset, num_bytes))
        offset += num_bytes + -num_bytes % ALIGN_BYTES
    if slots:
        yield Bucket(start, offset, tuple(slots), sender)
