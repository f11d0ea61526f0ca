"""Plans a publication: sender and receivers split the weights into byte buckets by the same rule.

A publication gives its weights a policy stamp, which identifies them by version and digest; stamps are compared here.
"""

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from lockstep.types.v1 import types_pb2

from services.common.errors import InvalidInput, PreconditionFailed, Reason

# Every tensor starts at a multiple of this in its bucket, so that views of any dtype are aligned.
ALIGN_BYTES = 16

T = TypeVar("T")
NamedTensors = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Place:
    """The place of one tensor in its bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Bucket:
    """Consecutive tensors of one sender, which are sent as one flat uint8 buffer.

    `start` counts bytes from the start of the first bucket; `sender` is a member of the weight group.
    """

    start: int
    num_bytes: int
    places: tuple[Place, ...]
    sender: int


class Plan:
    """Name, dtype and shape of every weight in publication order, and the buckets that follow from them."""

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
        """Whether the plan has adapters, so that a publication may leave the base out."""
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


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def split_into_runs(items: Iterable[T], goes_on: Callable[[list[T], T], bool]) -> Iterator[list[T]]:
    """Yields runs of consecutive items; `goes_on` says whether an item belongs to the run before it."""
    run: list[T] = []
    for item in items:
        if run and not goes_on(run, item):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def take_together(slots: Iterable[tuple[int, T]]) -> Iterator[list[T]]:
    """Groups slots into rounds: consecutive slots of different senders, which can gather at the same time."""
    for together in split_into_runs(slots, lambda run, slot: slot[0] not in {sender for sender, _ in run}):
        yield [part for _, part in together]


def _specs(tensors: NamedTensors) -> list[types_pb2.TensorSpec]:
    return [
        types_pb2.TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tensor.shape)
        for name, tensor in tensors
    ]


def _slots(message: types_pb2.WeightPlan) -> Iterator[tuple[int, list[Bucket]]]:
    """Yields each slot's sender and buckets. If there is only one sender, each bucket is a slot."""
    specs, start = iter(message.tensors), 0
    for sender, num_tensors in _parts_of_plan(message):
        buckets = list(_cut(itertools.islice(specs, num_tensors), message.bucket_bytes, start, sender))
        yield from [(sender, buckets)] if message.num_senders > 1 else [(sender, [bucket]) for bucket in buckets]
        start += sum(bucket.num_bytes for bucket in buckets)


def _parts_of_plan(message: types_pb2.WeightPlan) -> list[tuple[int, int]]:
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
        places.append(Place(spec.name, dtype, shape, contiguous_stride(shape), offset, num_bytes))
        offset += num_bytes + -num_bytes % ALIGN_BYTES
    if places:
        yield Bucket(start, offset, tuple(places), sender)


def require_stamp(expected: types_pb2.PolicyStamp, actual: types_pb2.PolicyStamp, *, who: str) -> None:
    """Enforces the on-policy contract: `actual`, the stamp of the service `who`, must equal `expected`."""
    if not expected.digest:
        raise InvalidInput("expected_stamp: required", field="expected_stamp")
    if not actual.digest:
        raise PreconditionFailed(f"{who} holds version {actual.version}, not published yet", reason=Reason.UNPUBLISHED)
    if expected == actual:
        return
    reason = Reason.STALE_STAMP if expected.version < actual.version else Reason.FUTURE_STAMP
    if expected.version == actual.version:  # the same number, but other weights
        reason = Reason.DIGEST_MISMATCH
    raise PreconditionFailed(
        f"{who} holds {show_stamp(actual)}, not {show_stamp(expected)}",
        reason=reason,
        held_version=actual.version,
        held_digest=actual.digest,
        expected_version=expected.version,
        expected_digest=expected.digest,
    )


def show_stamp(stamp: types_pb2.PolicyStamp) -> str:
    return f"version {stamp.version} ({stamp.digest[:8]})"
