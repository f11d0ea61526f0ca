"""Streams whole weights from the ranks that hold the shards."""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, cast

import torch
import torch.distributed as dist

from services.common.weights.buckets import Computed, Item, Span
from services.common.weights.plan import ALIGN_BYTES, take_together
from services.trainer.compat.torch import storage_id
from services.trainer.megatron.experts import GroupedExperts
from services.trainer.megatron.model import Chunk, ValueModel
from services.trainer.megatron.parallel import Parallelism
from services.trainer.megatron.weights.weight_map import Part

# A run is consecutive parameters with the same holders, which are sent together: up to this many bytes over all ranks.
_RUN_BYTES = 64 << 20
# A run smaller than a bucket divided by this, such as a layer's norms, may be sent by a rank that does not hold it.
_SMALL = 256
HEAD = "output_layer.weight"
"""Names the head of a language model and of a critic. The checkpoint that a critic starts from has no critic head."""

_EMPTY = torch.empty(0)

Streamed = Iterator[tuple[str, torch.Tensor]]
Slot = tuple[int, Sequence[int]]
"""Pairs a sender's rank with the indices of the consecutive runs that it sends."""


@dataclass(frozen=True)
class LocalTensor:
    """Holds a parameter of this rank, under its name in the whole model."""

    name: str
    tensor: torch.Tensor


@dataclass(frozen=True)
class Entry:
    """Describes a parameter of the whole model: the ranks that hold its shards, in shard order, and one shard."""

    name: str
    holders: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @cached_property  # every publication reads it for many thousand experts
    def num_bytes(self) -> int:
        """Returns the bytes of one shard."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class CheckpointNames(Protocol):
    """Maps the parameters of a stream to checkpoint tensors, as WeightMap does."""

    def part(self, name: str) -> Part:
        """Returns the checkpoint tensors of a parameter, and how to join its shards."""
        ...

    def is_published(self, name: str) -> bool:
        """Returns whether the stream contains the parameter."""
        ...


class Adapted(Protocol):
    """Describes a layer with an adapter, whose weight W is published as W + scale * B A."""

    def merged_weight(self) -> torch.Tensor:
        """Returns this rank's shard of the sum."""
        ...

    def merged_parts(self, views: Callable[[torch.Tensor], Sequence[torch.Tensor]]) -> list[Computed]:
        """Returns the tensors that `views` would return as views of the sum."""
        ...


def is_adapter(name: str) -> bool:
    """Returns whether a model tensor belongs to a LoRA adapter."""
    return ".lora_" in name


def local_parameters(chunks: Sequence[Chunk], parallelism: Parallelism, *, adapters: bool = False) -> list[LocalTensor]:
    """Returns this rank's parameters without adapters and critic heads, or with `adapters` only the adapters."""
    parameters = []
    for chunk in chunks:
        layers = {index: layer.layer_number - 1 for index, layer in enumerate(chunk.layers())}
        for name, tensor in _named_matrices(chunk):
            is_new = isinstance(chunk, ValueModel) and name == HEAD
            if is_adapter(name) == adapters and not is_new:
                parameters.append(LocalTensor(_global_name(name, layers, chunk, parallelism), tensor))
    return parameters


def _named_matrices(chunk: Chunk) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the parameters of a chunk; experts that share a parameter have a view of it each."""
    for prefix, module in chunk.named_modules():
        own = module.expert_weights() if isinstance(module, GroupedExperts) else module.named_parameters(recurse=False)
        yield from ((f"{prefix}.{name}" if prefix else name, tensor) for name, tensor in own)


class WeightStream:
    """Streams the policy under checkpoint names, always in the same order; no rank ever holds all of it.

    `adapted` returns the layer whose adapter is merged into a parameter, or None.
    """

    def __init__(
        self,
        parameters: Sequence[LocalTensor],
        names: CheckpointNames,
        parallelism: Parallelism,
        device: torch.device,
        adapted: Callable[[LocalTensor], Adapted | None] = lambda parameter: None,
    ):
        self._map, self._adapted = names, adapted
        self._rank = dist.get_rank()
        self._local = {parameter.name: parameter for parameter in parameters}
        self._device = device
        self._entries = self._find_holders(parallelism)
        self._parts = {entry.name: names.part(entry.name) for entry in self._entries}
        self._runs = list(_runs(self._entries))
        self._neighbors = [list(self._together(run)) for run in self._runs]
        self._names = [[name for entry in run for name in self._parts[entry.name].names] for run in self._runs]
        # Views of each parameter, by name. Making new ones for every publication would take longer than copying the
        # numbers.
        self._views: dict[str, list[tuple[str, torch.Tensor]]] = {}

    def specs(self) -> list[tuple[str, torch.Tensor]]:
        """Returns names and meta tensors."""
        meta = ((entry, [torch.empty(entry.shape, dtype=entry.dtype, device="meta")]) for entry in self._entries)
        return [pair for entry, shard in meta for pair in self._joined(entry, shard * len(entry.holders))]

    def slots(self, bucket_bytes: int) -> list[tuple[int, int]]:
        """Returns the slots in which the ranks send `specs`: the sender's rank and the number of its tensors.

        A slot fills at most one bucket, unless one run is larger. The sender is a rank that holds the slot's tensors,
        so that several ranks gather and pack at the same time, and tensors on only one rank are not gathered. Small
        runs stay in the slot before them.
        """
        slots = self._slots(bucket_bytes)
        return [(sender, sum(len(self._names[index]) for index in indices)) for sender, indices in slots]

    def to_senders(self, bucket_bytes: int) -> Iterator[Iterator[Item]]:
        """Yields this rank's whole tensors of each round of `slots`. All ranks must finish all rounds."""
        for together in take_together((slot[0], slot) for slot in self._slots(bucket_bytes)):
            streamed = self._gather(together, spans=True)
            yield streamed
            for _ in streamed:
                pass

    def to_first(self) -> Streamed:
        """Yields all whole tensors on rank 0, and as many empty ones, at the same times, on other ranks."""
        return cast(Streamed, self._to_first(spans=False))

    def spans_to_first(self) -> Iterator[Item]:
        """Does the same, but tensors that are neighbors in the memory of rank 0 come together."""
        return self._to_first(spans=True)

    def _to_first(self, *, spans: bool) -> Iterator[Item]:
        for index in range(len(self._runs)):
            yield from self._gather([(0, [index])], spans=spans)
            if self._rank != 0:
                yield from ((name, _EMPTY) for name in self._names[index])

    def _slots(self, bucket_bytes: int) -> Iterator[Slot]:
        return _deal(self._runs, [len(names) for names in self._names], bucket_bytes)

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
                yield from self._whole(own, received)

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
                operations.append(dist.P2POp(dist.isend, self._flat(run), sender))
        # A batch uses the communicator of all ranks; single operations would make one for each pair of ranks.
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return received

    def _whole(self, run: Sequence[Entry], received: dict[int, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the joined shards of all holders; this rank's own shards are not copied first."""
        holders = run[0].holders
        per_holder = [_shards(received[h], run) if h in received else self._own(run) for h in holders]
        for entry, *shards in zip(run, *per_holder, strict=True):
            yield from self._joined(entry, shards)

    def _spans(self, index: int) -> Iterator[Item]:
        """Yields the tensors of a run that only this rank holds, those that are neighbors in memory together."""
        for entries in self._neighbors[index]:
            if len(entries) == 1:
                yield from self._alone(entries[0])
            else:
                first, num_bytes = self._local[entries[0].name].tensor, sum(entry.num_bytes for entry in entries)
                names = [name for entry in entries for name in self._parts[entry.name].names]
                yield Span(names, first.detach().as_strided((num_bytes // first.element_size(),), (1,)))

    def _alone(self, entry: Entry) -> Sequence[Item]:
        """Returns the tensors of a parameter that only this rank holds."""
        part, parameter = self._parts[entry.name], self._local[entry.name].tensor
        if part.views is None or parameter.device != self._device:
            return list(self._joined(entry, self._own([entry])))
        if layer := self._adapted(self._local[entry.name]):
            return list(zip(part.names, layer.merged_parts(part.views), strict=True))
        views = self._views.get(entry.name, [])
        if not views or views[0][1].data_ptr() != parameter.data_ptr():  # it has other memory now
            views = list(zip(part.names, part.views(parameter.detach()), strict=True))
            self._views[entry.name] = views
        return views

    def _together(self, run: Sequence[Entry]) -> Iterator[list[Entry]]:
        """Divides a run into parameters that are neighbors in this rank's memory, if only this rank holds them."""
        together: list[Entry] = []
        for entry in run:
            if together and not self._follows(together[-1], entry):
                yield together
                together = []
            together.append(entry)
        yield together

    def _follows(self, before: Entry, entry: Entry) -> bool:
        """Returns whether a parameter begins where the one before it ends, and so do their tensors in a bucket."""
        if entry.holders != (self._rank,) or any(self._adapted(self._local[one.name]) for one in (before, entry)):
            return False
        parts = self._parts[before.name], self._parts[entry.name]
        shapes = [shape for part in parts for shape in part.shapes]
        first, second = self._local[before.name].tensor, self._local[entry.name].tensor
        return (
            all(part.is_plain for part in parts)
            and all(torch.Size(shape).numel() * entry.dtype.itemsize % ALIGN_BYTES == 0 for shape in shapes)
            and first.is_contiguous()
            and second.is_contiguous()
            and second.device == self._device
            and storage_id(first) == storage_id(second)
            and first.storage_offset() + first.numel() == second.storage_offset()
        )

    def _own(self, run: Sequence[Entry]) -> list[torch.Tensor]:
        return [self._value(self._local[entry.name]).detach().to(self._device) for entry in run]

    def _value(self, parameter: LocalTensor) -> torch.Tensor:
        layer = self._adapted(parameter)
        return layer.merged_weight() if layer else parameter.tensor

    def _flat(self, run: Sequence[Entry]) -> torch.Tensor:
        flats = [shard.contiguous().view(-1).view(torch.uint8) for shard in self._own(run)]
        return torch.cat(flats) if len(flats) > 1 else flats[0]

    def _joined(self, entry: Entry, shards: Sequence[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        part = self._parts[entry.name]
        return zip(part.names, part.join(shards), strict=True)

    def _find_holders(self, parallelism: Parallelism) -> list[Entry]:
        """Returns the entries of all ranks' parameters. The holders are in the first replica, in shard order."""
        own = []
        for parameter in self._local.values():
            part, tensor = self._map.part(parameter.name), parameter.tensor
            if parallelism.is_holder(tensor, is_expert=part.is_expert) and self._map.is_published(parameter.name):
                index, _ = parallelism.shard_index(tensor, is_expert=part.is_expert)
                own.append([parameter.name, index, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")])
        shards: dict[str, dict[int, int]] = {}
        kinds = {}
        for rank, theirs in enumerate(gather_json(own, self._device)):
            for name, index, shape, dtype in theirs:
                shards.setdefault(name, {})[index] = rank
                kinds[name] = (tuple(shape), getattr(torch, dtype))
        names = sorted(shards, key=lambda name: self._map.part(name).order)
        return [Entry(name, tuple(rank for _, rank in sorted(shards[name].items())), *kinds[name]) for name in names]


def gather_json(value: object, device: torch.device, group: dist.ProcessGroup | None = None) -> list:
    """Gathers every rank's `value` in rank order. Values are JSON data."""
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([own.numel()], device=device), group=group)
    longest = max(int(size) for size in sizes)
    padded = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(padded, torch.cat([own, own.new_zeros(longest - own.numel())]), group=group)
    return [json.loads(bytes(text[: int(size)].cpu().numpy())) for text, size in zip(padded, sizes, strict=True)]


def _shards(flat: torch.Tensor, run: Sequence[Entry]) -> list[torch.Tensor]:
    parts = flat.split([entry.num_bytes for entry in run])
    return [part.view(entry.dtype).view(entry.shape) for part, entry in zip(parts, run, strict=True)]


def _deal(runs: Sequence[Sequence[Entry]], num_tensors: Sequence[int], bucket_bytes: int) -> Iterator[Slot]:
    """Yields slots of at most one bucket, or of one larger run. The next sender is the holder that has sent least."""
    sent: Counter[int] = Counter()
    sender, indices, in_slot = 0, [], 0
    for index, (run, count) in enumerate(zip(runs, num_tensors, strict=True)):
        holders = run[0].holders
        num_bytes = len(holders) * sum(entry.num_bytes for entry in run) + count * ALIGN_BYTES
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


def _runs(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    run: list[Entry] = []
    for entry in entries:
        is_full = (sum(e.num_bytes for e in run) + entry.num_bytes) * len(entry.holders) > _RUN_BYTES
        if run and (is_full or entry.holders != run[0].holders or entry.dtype != run[0].dtype):
            yield run
            run = []
        run.append(entry)
    if run:
        yield run


def _global_name(name: str, layers: dict[int, int], chunk: Chunk, parallelism: Parallelism) -> str:
    parts = name.split(".")
    if name.startswith("decoder.layers."):
        parts[2] = str(layers[int(parts[2])])
    if ".experts." not in name:
        return ".".join(parts)
    config = chunk.config
    assert config.num_moe_experts is not None
    first = parallelism.expert_rank * (config.num_moe_experts // config.expert_model_parallel_size)
    if "local_experts" in parts:
        place = parts.index("local_experts") + 1
        parts[place] = str(int(parts[place]) + first)
    else:  # ...linear_fc1.weight3
        parts[-1] = "weight" + str(int(parts[-1].removeprefix("weight")) + first)
    return ".".join(parts)
