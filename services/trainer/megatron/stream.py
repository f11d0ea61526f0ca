"""Streams whole weights, or a policy's adapters, from the ranks that hold the shards to those that send them."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
import torch.distributed as dist

from services.common.weights.buckets import Item, Span
from services.common.weights.plan import ALIGN_BYTES, split_into_runs, take_together
from services.trainer.checkpoint.ranks import gather_json
from services.trainer.compat.torch import storage_id
from services.trainer.megatron.lora import AdaptedLinear
from services.trainer.megatron.role import Parallelism
from services.trainer.megatron.weights import Part

# A run is consecutive parameters with the same holders, which are sent together: up to this many bytes over all ranks.
_RUN_BYTES = 64 << 20
# A run smaller than a bucket divided by this, such as a layer's norms, may be sent by a rank that does not hold it.
_SMALL = 256
_EMPTY = torch.empty(0)

Slot = tuple[int, Sequence[int]]
"""A sender's rank, and the indices of the consecutive runs that it sends."""


@dataclass(frozen=True)
class Entry:
    """A parameter of the whole model: the ranks that hold its shards, in shard order, and one shard."""

    name: str
    holders: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @cached_property  # every publication reads it for many thousand experts
    def num_bytes(self) -> int:
        """Of one shard."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class WeightStream:
    """Streams the policy under checkpoint names, always in the same order; no rank ever holds all of it.

    `parameters` are those of this rank by their names in the whole model, which `part_of` maps to checkpoint tensors.
    `adapted` returns the layer whose adapter is merged into a parameter, or None.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        part_of: Callable[[str], Part],
        parallelism: Parallelism,
        device: torch.device,
        adapted: Callable[[torch.Tensor], AdaptedLinear | None] = lambda parameter: None,
    ):
        self._part_of, self._adapted = part_of, adapted
        self._rank, self._local, self._device = dist.get_rank(), parameters, device
        self._entries = self._find_holders(parallelism)
        self._parts = {entry.name: part_of(entry.name) for entry in self._entries}
        self._runs = list(split_into_runs(self._entries, _is_in))
        # Parameters of each run that are neighbors in this rank's memory, if only this rank holds them.
        follows = lambda together, entry: self._is_adjacent(together[-1], entry)  # noqa: E731
        self._neighbors = [list(split_into_runs(run, follows)) for run in self._runs]
        self._names = [[name for entry in run for name in self._parts[entry.name].names] for run in self._runs]
        # Views of each parameter. Making new ones for every publication would take longer than copying the numbers.
        self._views: dict[str, list[tuple[str, torch.Tensor]]] = {}

    def specs(self) -> list[tuple[str, torch.Tensor]]:
        meta = ((entry, [torch.empty(entry.shape, dtype=entry.dtype, device="meta")]) for entry in self._entries)
        return [pair for entry, shard in meta for pair in self._joined(entry, shard * len(entry.holders))]

    def slots(self, bucket_bytes: int) -> list[tuple[int, int]]:
        """Returns the slots in which the ranks send `specs`: the sender's rank and the number of its tensors.

        A slot fills at most one bucket, unless one run is larger. The sender is a rank that holds the slot's tensors,
        so that several ranks gather and pack at the same time, and tensors on only one rank are not gathered. Small
        runs stay in the slot before them.
        """
        slots = _to_slots(self._runs, self._names, bucket_bytes)
        return [(sender, sum(len(self._names[index]) for index in indices)) for sender, indices in slots]

    def to_senders(self, bucket_bytes: int) -> Iterator[Iterator[Item]]:
        """Yields this rank's whole tensors of each round of `slots`. All ranks must finish all rounds."""
        for together in take_together((slot[0], slot) for slot in _to_slots(self._runs, self._names, bucket_bytes)):
            streamed = self._gather(together, spans=True)
            yield streamed
            for _ in streamed:
                pass

    def to_first(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields all whole tensors on rank 0, and as many empty ones, at the same times, on other ranks."""
        return cast(Iterator[tuple[str, torch.Tensor]], self.spans_to_first(spans=False))

    def spans_to_first(self, *, spans: bool = True) -> Iterator[Item]:
        """Does the same, but tensors that are neighbors in the memory of rank 0 come together."""
        for index in range(len(self._runs)):
            yield from self._gather([(0, [index])], spans=spans)
            if self._rank != 0:
                yield from ((name, _EMPTY) for name in self._names[index])

    def _gather(self, slots: Sequence[Slot], *, spans: bool) -> Iterator[Item]:
        """Yields this rank's slot, run by run. All slots advance together, so each rank sends and receives at once."""
        for column in itertools.zip_longest(*(indices for _, indices in slots)):
            indices = {sender: i for (sender, _), i in zip(slots, column, strict=True) if i is not None}
            index = indices.pop(self._rank, None)
            own = None if index is None else self._runs[index]
            received = self._exchange(own, [(sender, self._runs[i]) for sender, i in indices.items()])
            if index is not None and spans and not received:
                yield from self._spans(index)
            elif own is not None:
                yield from self._join(own, received)

    def _exchange(
        self, own: Sequence[Entry] | None, others: Sequence[tuple[int, Sequence[Entry]]]
    ) -> dict[int, torch.Tensor]:
        """Sends this rank's shards of other senders' runs; returns the received shards of `own`, by rank."""
        received = {}
        if own:
            num_bytes = sum(entry.num_bytes for entry in own)
            holders = [holder for holder in own[0].holders if holder != self._rank]
            received = {h: torch.empty(num_bytes, dtype=torch.uint8, device=self._device) for h in holders}
        operations = [dist.P2POp(dist.irecv, flat, holder) for holder, flat in received.items()]
        for sender, run in others:
            if self._rank in run[0].holders:
                operations.append(dist.P2POp(dist.isend, self._as_bytes(run), sender))
        # A batch uses the communicator of all ranks; single operations would make one for each pair of ranks.
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return received

    def _join(self, run: Sequence[Entry], received: dict[int, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the joined shards of all holders; this rank's own shards are not copied first."""
        holders = run[0].holders
        per_holder = [_shards(received[h], run) if h in received else self._local_shards(run) for h in holders]
        for entry, *shards in zip(run, *per_holder, strict=True):
            yield from self._joined(entry, shards)

    def _spans(self, index: int) -> Iterator[Item]:
        """Yields the tensors of a run that only this rank holds, those that are neighbors in memory together."""
        for entries in self._neighbors[index]:
            if len(entries) == 1:
                yield from self._own_tensors(entries[0])
            else:
                first, num_bytes = self._local[entries[0].name], sum(entry.num_bytes for entry in entries)
                names = [name for entry in entries for name in self._parts[entry.name].names]
                yield Span(names, first.detach().as_strided((num_bytes // first.element_size(),), (1,)))

    def _own_tensors(self, entry: Entry) -> Sequence[Item]:
        """Returns the tensors of a parameter that only this rank holds."""
        part, parameter = self._parts[entry.name], self._local[entry.name]
        if part.views is None or parameter.device != self._device:
            return list(self._joined(entry, list(self._local_shards([entry]))))
        if layer := self._adapted(parameter):
            return list(zip(part.names, layer.merged_parts(part.views), strict=True))
        views = self._views.get(entry.name, [])
        if not views or views[0][1].data_ptr() != parameter.data_ptr():  # it has other memory now
            views = list(zip(part.names, part.views(parameter.detach()), strict=True))
            self._views[entry.name] = views
        return views

    def _is_adjacent(self, before: Entry, entry: Entry) -> bool:
        """Returns whether a parameter begins where the one before it ends, and so do their tensors in a bucket."""
        if entry.holders != (self._rank,) or any(self._adapted(self._local[one.name]) for one in (before, entry)):
            return False
        parts = self._parts[before.name], self._parts[entry.name]
        shapes = [shape for part in parts for shape in part.shapes]
        first, second = self._local[before.name], self._local[entry.name]
        return (
            all(part.is_plain for part in parts)
            and all(torch.Size(shape).numel() * entry.dtype.itemsize % ALIGN_BYTES == 0 for shape in shapes)
            and first.is_contiguous()
            and second.is_contiguous()
            and second.device == self._device
            and storage_id(first) == storage_id(second)
            and first.storage_offset() + first.numel() == second.storage_offset()
        )

    def _local_shards(self, run: Sequence[Entry]) -> Iterator[torch.Tensor]:
        for parameter in (self._local[entry.name] for entry in run):
            layer = self._adapted(parameter)
            yield (layer.merged_weight() if layer else parameter).detach().to(self._device)

    def _as_bytes(self, run: Sequence[Entry]) -> torch.Tensor:
        flats = [shard.contiguous().view(-1).view(torch.uint8) for shard in self._local_shards(run)]
        return torch.cat(flats) if len(flats) > 1 else flats[0]

    def _joined(self, entry: Entry, shards: Sequence[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        part = self._parts[entry.name]
        return zip(part.names, part.join(shards), strict=True)

    def _find_holders(self, parallelism: Parallelism) -> list[Entry]:
        """Returns the entries of all ranks' parameters. The holders are in the first replica, in shard order."""
        own = []
        for name, tensor in self._local.items():
            part = self._part_of(name)
            if parallelism.is_holder(tensor, is_expert=part.is_expert):
                index, _ = parallelism.shard_index(tensor, is_expert=part.is_expert)
                own.append([name, index, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")])
        shards: dict[str, dict[int, int]] = {}
        kinds = {}
        for rank, theirs in enumerate(gather_json(own, self._device)):
            for name, index, shape, dtype in theirs:
                shards.setdefault(name, {})[index] = rank
                kinds[name] = (tuple(shape), getattr(torch, dtype))
        names = sorted(shards, key=lambda name: self._part_of(name).order)
        return [Entry(name, tuple(rank for _, rank in sorted(shards[name].items())), *kinds[name]) for name in names]


def _shards(flat: torch.Tensor, run: Sequence[Entry]) -> list[torch.Tensor]:
    parts = flat.split([entry.num_bytes for entry in run])
    return [part.view(entry.dtype).view(entry.shape) for part, entry in zip(parts, run, strict=True)]


def _to_slots(runs: Sequence[Sequence[Entry]], names: Sequence[Sequence[str]], bucket_bytes: int) -> Iterator[Slot]:
    """Yields slots of at most one bucket, or of one larger run. The next sender is the holder that has sent least."""
    sent: Counter[int] = Counter()
    sender, indices, in_slot = 0, [], 0
    for index, (run, names_of_run) in enumerate(zip(runs, names, strict=True)):
        holders = run[0].holders
        num_bytes = len(holders) * sum(entry.num_bytes for entry in run) + len(names_of_run) * ALIGN_BYTES
        is_foreign = sender not in holders and num_bytes > bucket_bytes // _SMALL
        if is_foreign or in_slot + num_bytes > bucket_bytes:
            if indices:
                yield sender, indices
            sender, indices, in_slot = min(holders, key=lambda rank: sent[rank]), [], 0
        indices.append(index)
        sent[sender] += num_bytes
        in_slot += num_bytes
    if indices:
        yield sender, indices


def _is_in(run: Sequence[Entry], entry: Entry) -> bool:
    num_bytes = sum(one.num_bytes for one in (*run, entry)) * len(entry.holders)
    return num_bytes <= _RUN_BYTES and (entry.holders, entry.dtype) == (run[0].holders, run[0].dtype)
