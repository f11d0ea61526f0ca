"""What a publication sends, cut into byte buckets by the same rule on both ends."""

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from lockstep.types.v1 import types_pb2

from services.common.errors import InternalError, InvalidInput

# Every tensor starts at a multiple of this, so that views of any dtype are aligned.
ALIGN_BYTES = 16

NamedTensors = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Slot:
    """Place of one tensor in its bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Bucket:
    """Consecutive tensors that travel as one flat uint8 buffer; `start` counts bytes from the first bucket's begin."""

    start: int
    num_bytes: int
    slots: tuple[Slot, ...]


class Plan:
    """Name, dtype and shape of every weight in publication order, and the buckets that follow from them."""

    def __init__(self, message: types_pb2.WeightPlan):
        self.message = message
        self.buckets = tuple(_cut(message))
        self.num_bytes = sum(slot.num_bytes for bucket in self.buckets for slot in bucket.slots)

    @classmethod
    def of(cls, tensors: NamedTensors, *, bucket_bytes: int) -> "Plan":
        """The plan of `tensors` (meta tensors will do) in their order."""
        specs = [
            types_pb2.TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tensor.shape)
            for name, tensor in tensors
        ]
        return cls(types_pb2.WeightPlan(tensors=specs, bucket_bytes=bucket_bytes))

    @cached_property
    def digest(self) -> str:
        """128-bit hash, in hexadecimal, of the names, dtypes and shapes, whatever the bucket size."""
        hasher = hashlib.blake2b(digest_size=16)
        for spec in self.message.tensors:
            hasher.update(f"{spec.name} {spec.dtype} {list(spec.shape)}\n".encode())
        return hasher.hexdigest()


def pack(plan: Plan, tensors: NamedTensors, device: torch.device) -> Iterator[tuple[Bucket, torch.Tensor]]:
    """Fills one new buffer (uint8 [num_bytes]) after the other from `tensors`, which must come in the plan's order.

    Raises:
        InternalError: A tensor is not the one that the plan has at its place, or comes after its end.
    """
    source = iter(tensors)
    for bucket in plan.buckets:
        flat = torch.zeros(bucket.num_bytes, dtype=torch.uint8, device=device)
        tensors_in_bucket = []
        for slot in bucket.slots:
            name, tensor = next(source, ("nothing", torch.empty(0)))
            if (name, tensor.dtype, tuple(tensor.shape)) != (slot.name, slot.dtype, slot.shape):
                raise InternalError(
                    f"export order changed: the plan has {slot.name} {slot.dtype} {slot.shape}, "
                    f"got {name} {tensor.dtype} {tuple(tensor.shape)}"
                )
            tensors_in_bucket.append(tensor.detach())
        # One call for all: launching a copy for each would take longer than the copies.
        torch._foreach_copy_([view for _, view in unpack(bucket, flat)], tensors_in_bucket)
        yield bucket, flat
    for name, _ in source:
        raise InternalError(f"export order changed: the plan ends before {name}")


def unpack(bucket: Bucket, flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of `flat` (uint8 [num_bytes]), one for each tensor of the bucket."""
    for slot in bucket.slots:
        yield slot.name, flat[slot.offset : slot.offset + slot.num_bytes].view(slot.dtype).view(slot.shape)


def _cut(message: types_pb2.WeightPlan) -> Iterator[Bucket]:
    slots: list[Slot] = []
    start = offset = 0
    for spec in message.tensors:
        dtype = getattr(torch, spec.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise InvalidInput(f"plan: {spec.name} has unknown dtype {spec.dtype!r}", field="plan")
        num_bytes = math.prod(spec.shape) * dtype.itemsize
        if slots and offset + num_bytes > message.bucket_bytes:
            yield Bucket(start=start, num_bytes=offset, slots=tuple(slots))
            start, offset, slots = start + offset, 0, []
        slots.append(Slot(spec.name, dtype, tuple(spec.shape), offset, num_bytes))
        offset += num_bytes + -num_bytes % ALIGN_BYTES
    if slots:
        yield Bucket(start=start, num_bytes=offset, slots=tuple(slots))
