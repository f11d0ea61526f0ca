"""Packs weights into the buckets of a plan, unpacks them, and hashes their content.

A mixture of experts has tens of thousands of weights, which a rank keeps in a few large tensors. Weights that are
neighbors there and in the plan are a `Span`, which is copied at once: a call for each would take longer than the bytes.
"""

import hashlib
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from lockstep.types.v1.types_pb2 import PublicationCost

from services.common.compat.torch import Copies
from services.common.errors import InternalError
from services.common.json_values import JsonObject
from services.common.weights.plan import ALIGN_BYTES, Bucket, NamedTensors, Place, Plan, contiguous_stride


@dataclass(frozen=True)
class Span:
    """Consecutive weights of a plan that are neighbors in memory: their names, and all their numbers, 1-D."""

    names: Sequence[str]
    flat: torch.Tensor


@dataclass(frozen=True)
class Computed:
    """A weight that is computed where it is needed, in the bucket, so that no copy of it is made."""

    like: torch.Tensor
    """A tensor with the weight's shape and dtype."""
    write: Callable[[torch.Tensor], None]
    """Writes the weight into a tensor of that shape and dtype."""


# A tensor's rows may be in groups: [groups, rows of a group, ...] instead of [rows, ...].
Item = tuple[str, torch.Tensor | Computed] | Span
Items = Iterable[Item]


class Source:
    """Items in the order of a plan, from which places are filled; every mismatch is an InternalError."""

    def __init__(self, items: Items):
        self._items: Iterator[Item] = iter(items)
        self._rest: Span | None = None

    def take(self, places: Sequence[Place], begin: int) -> tuple[int, torch.Tensor | Computed]:
        """Takes the next item. Returns how many of the places from `begin` on it fills, at least one, and what fills
        them."""
        item, self._rest = self._rest or next(self._items, None), None
        if not isinstance(item, Span):
            return 1, _checked(places[begin], item)
        filled = places[begin : begin + len(item.names)]
        if len(filled) < len(item.names):
            numel = sum(place.num_bytes for place in filled) // item.flat.element_size()
            self._rest = Span(item.names[len(filled) :], item.flat[numel:])
            item = Span(item.names[: len(filled)], item.flat[:numel])
        _require_filled(filled, item)
        return len(filled), item.flat

    def end(self) -> None:
        """Raises InternalError if an item is left."""
        item = self._rest or next(self._items, None)
        if item is not None:
            name = item.names[0] if isinstance(item, Span) else item[0]
            raise InternalError(f"export order changed: the plan ends before {name}")


def _checked(place: Place, item: tuple[str, torch.Tensor | Computed] | None) -> torch.Tensor | Computed:
    name, value = item or ("nothing", torch.empty(0))
    tensor = value.like if isinstance(value, Computed) else value
    shape = tuple(tensor.shape)
    if place.shape and len(shape) == len(place.shape) + 1:  # rows in groups
        shape = (shape[0] * shape[1], *shape[2:])
    if (name, tensor.dtype, shape) != (place.name, place.dtype, place.shape):
        raise InternalError(
            f"export order changed: the plan has {place.name} {place.dtype} {place.shape}, "
            f"got {name} {tensor.dtype} {tuple(tensor.shape)}"
        )
    return value


def _require_filled(places: Sequence[Place], span: Span) -> None:
    """Checks that the weights of a span fill `places`, between which there are no gaps."""
    for place, name in zip(places, span.names, strict=True):
        if (place.name, place.dtype) != (name, span.flat.dtype):
            raise InternalError(
                f"export order changed: the plan has {place.name} {place.dtype}, got {name} {span.flat.dtype}"
            )
    num_bytes = sum(place.num_bytes for place in places)
    covered = places[-1].offset + places[-1].num_bytes - places[0].offset
    if not covered == num_bytes == span.flat.nbytes:
        raise InternalError(
            f"{span.names[0]} to {span.names[-1]}: {span.flat.numel()} numbers do not fill {covered} bytes of the plan"
        )


# Maximum bytes copied into a bucket by one call. A call per tensor would take longer than the copies themselves, but
# the gathered tensors are kept in memory until the call.
_COPY_BYTES = 64 << 20

# Returns memory for a bucket of so many bytes.
Buffer = Callable[[int], torch.Tensor]


def pack(
    plan: Plan, tensors: Items, device: torch.device, *, skips_base: bool = False, buffer: Buffer | None = None
) -> Iterator[tuple[Bucket, torch.Tensor]]:
    """Yields each bucket with its bytes (uint8 [num_bytes]), filled from `tensors`, which must be in plan order.

    They are packed into what `buffer` returns for their number, by default new memory. A tensor that is alone in its
    bucket is not copied if its bytes can be sent as they are. With `skips_base`, `tensors` and the buckets are those of
    the adapter only.
    """
    source = Source(tensors)
    for bucket in plan.buckets[plan.first_bucket(skips_base=skips_base) :]:
        yield bucket, _fill(bucket, source, device, buffer)
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
    """
    for buckets, tensors in zip(plan.rounds, rounds, strict=True):
        source = Source(tensors)
        flats = [_fill(bucket, source, device) if bucket.sender == sender else None for bucket in buckets]
        source.end()
        for bucket in buckets:
            yield bucket, flats.pop(0)


def unpack(bucket: Bucket, flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields a view of `flat` (uint8 [num_bytes]) for each tensor of the bucket, with its name."""
    typed = _typed(bucket, flat)
    for place in bucket.places:
        yield place.name, _view(typed, place, place.shape, place.stride)


def _fill(bucket: Bucket, source: Source, device: torch.device, buffer: Buffer | None = None) -> torch.Tensor:
    places = bucket.places
    num, value = source.take(places, 0)
    if len(places) == 1 and isinstance(value, torch.Tensor) and value.device == device and _is_flat(value):
        return value.detach().view(-1).view(torch.uint8)
    num_bytes = bucket.num_bytes
    flat = buffer(num_bytes) if buffer else torch.empty(num_bytes, dtype=torch.uint8, device=device)
    _clear_gaps(bucket, flat)
    typed = _typed(bucket, flat)
    targets: list[torch.Tensor] = []
    tensors: list[torch.Tensor] = []
    done = waiting_bytes = 0
    while True:
        if isinstance(value, Computed):
            value.write(_target(typed, places[done], value.like))
        else:
            targets.append(_target(typed, places[done], value))
            tensors.append(value)
            waiting_bytes += value.nbytes
        done += num
        del value  # taking the next one may gather it, which needs memory
        if waiting_bytes > _COPY_BYTES or done == len(places):
            with torch.no_grad():
                Copies(targets, tensors).run()
            targets, tensors, waiting_bytes = [], [], 0
        if done == len(places):
            return flat
        num, value = source.take(places, done)


def _typed(bucket: Bucket, flat: torch.Tensor) -> dict[torch.dtype, torch.Tensor]:
    return {dtype: flat.view(dtype) for dtype in {place.dtype for place in bucket.places}}


def _target(typed: dict[torch.dtype, torch.Tensor], place: Place, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.shape == place.shape:
        return _view(typed, place, place.shape, place.stride)
    shape = tuple(tensor.shape)  # the numbers of several tensors, or rows in groups
    return _view(typed, place, shape, contiguous_stride(shape))


def _view(
    typed: dict[torch.dtype, torch.Tensor], place: Place, shape: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    # One call instead of three (a slice and two views), because a large mixture of experts has 20,000 tensors.
    flat = typed[place.dtype]
    return flat.as_strided(shape, stride, int(flat.storage_offset()) + place.offset // place.dtype.itemsize)


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


class Cost:
    """The cost of one publication. Create it at the start; call `measured` once the device has finished."""

    wait_s = 0.0
    """Time that a receiver has waited for buckets, which it adds itself."""

    def __init__(self, device: torch.device):
        self._cuda = device if device.type == "cuda" else None
        self._digest_s = 0.0
        self._kernels: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._cuda)
            self._allocated_bytes = torch.cuda.memory_allocated(self._cuda)

    @contextmanager
    def hashing(self) -> Generator[None]:
        """Times the hashing of a bucket on the device that computes it."""
        if self._cuda:
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
            yield
            events[1].record()
            self._kernels.append(events)
        else:
            begin = time.perf_counter()
            yield
            self._digest_s += time.perf_counter() - begin

    def measured(self) -> dict[str, float]:
        """Returns the fields of types.v1.PublicationCost."""
        digest_s = self._digest_s + sum(begin.elapsed_time(end) for begin, end in self._kernels) / 1e3  # from ms
        extra = torch.cuda.max_memory_allocated(self._cuda) - self._allocated_bytes if self._cuda else 0
        return {"digest_s": digest_s, "extra_bytes": extra}


def highest_cost(costs: Sequence[JsonObject]) -> PublicationCost:
    """Returns the largest of each cost over members, which work at the same time."""
    return PublicationCost(**{name: max(cost[name] for cost in costs) for name in costs[0]})


_CONSTANTS = (0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
_POSITION, _MIX_1, _MIX_2 = (constant - (1 << 64) for constant in _CONSTANTS)
# A piece and its scratch memory stay in a core's cache, and torch does not divide so few elements among threads. On two
# busy cores pieces of 64 MiB took 24 times as much CPU time.
_CHUNK_WORDS = 32 << 10


def _shift_right(words: torch.Tensor, bits: int) -> torch.Tensor:
    # torch shifts int64 arithmetically; a logical shift keeps the mixing a bijection.
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _mix_words(words: torch.Tensor, first: int) -> torch.Tensor:
    index = torch.arange(first + 1, first + 1 + words.numel(), dtype=torch.int64, device=words.device)
    words = words ^ (index * _POSITION)
    words = (words ^ _shift_right(words, 33)) * _MIX_1
    words = (words ^ _shift_right(words, 33)) * _MIX_2
    return words ^ _shift_right(words, 33)


# The two sums over a part of the content: the state of a WeightDigest without its plan. (0, 0) is no content.
Sums = tuple[int, int]


class WeightDigest:
    """Hashes the buckets of a publication, in any order, to 128 bits on their device, with one transfer to the host.

    Every 64-bit word is mixed with its position by a bijection (the finalizer of MurmurHash3, Appleby 2011), and two
    different functions of the result are summed modulo 2^64. Changing one word therefore always changes the hash;
    several changes cancel out with a probability of about 2^-128. The hash protects against faults, not against an
    adversary. A part of the content whose `sums` are known need not be hashed again.
    """

    def __init__(self, plan_digest: str, device: torch.device, sums: Sums = (0, 0)):
        self._plan_digest = plan_digest
        self._sums = torch.tensor(sums, dtype=torch.int64, device=device)

    def update(self, flat: torch.Tensor, *, start: int) -> None:
        """Adds a bucket (uint8, a multiple of 16 bytes) that starts at byte `start` of the publication."""
        words, first = flat.view(torch.int64), start // 8
        if words.is_cuda:
            from services.common.weights.digest_gpu import add_sums

            add_sums(self._sums, words, first, _CONSTANTS)
            return
        for at in range(0, words.numel(), _CHUNK_WORDS):
            mixed = _mix_words(words[at : at + _CHUNK_WORDS], first + at)
            self._sums[0] += mixed.sum()
            self._sums[1] += ((mixed ^ _shift_right(mixed, 29)) * _MIX_1).sum()

    def add(self, sums: Sums) -> None:
        self._sums += torch.tensor(sums, dtype=torch.int64, device=self._sums.device)

    def sums(self) -> Sums:
        """Returns the sums of the content that was added so far. Waits for the device."""
        first, second = map(int, self._sums.cpu())
        return first, second

    def hexdigest(self) -> str:
        """Returns the hash of plan and content as 32 hexadecimal digits. Waits for the device."""
        hasher = hashlib.blake2b(self._plan_digest.encode(), digest_size=16)
        for value in self.sums():
            hasher.update(value.to_bytes(8, "little", signed=True))
        return hasher.hexdigest()
