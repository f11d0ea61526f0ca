"""Tests ranks that gather for one another while each sends: everything arrives, and no rank waits forever.

Ranks are threads here. A broadcast is done when all members have begun it. An exchange blocks until its peers take
part, and begins when the broadcasts that its rank has begun are done. This can happen with NCCL, where loading a kernel
or freeing memory waits for all that runs on the GPU.
"""

import itertools
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings

from services.common.weights.buckets import pack, unpack
from services.common.weights.plan import Plan
from services.trainer.megatron import stream as module
from services.trainer.megatron.stream import WeightStream
from services.trainer.megatron.weights import Part
from services.trainer.ranks.publish import send
from tests.support import PATIENCE_S

CPU, TIMEOUT_S = torch.device("cpu"), PATIENCE_S
Layout = list[tuple[tuple[int, ...], int, int]]
"""The holders of each parameter, the numbers in one shard, and how many tensors it is in the checkpoint."""


class Exchanges:
    """Provides what the stream uses of torch.distributed, for ranks that are threads."""

    isend, irecv = "send", "receive"

    def __init__(self, world_size: int):
        self.own = threading.local()
        # Made beforehand: two threads that miss a key of a defaultdict at once get different values.
        self._sent = {pair: Queue[Any]() for pair in itertools.product(range(world_size), repeat=2)}
        self._told: list[Any] = [None] * world_size
        self._all = threading.Barrier(world_size)

    def get_rank(self) -> int:
        return self.own.rank

    def gather_json(self, value: object, device: torch.device) -> list:
        self._told[self.own.rank] = value
        self._all.wait(TIMEOUT_S)
        return self._told

    def P2POp(self, kind: str, tensor: torch.Tensor, peer: int) -> tuple:
        return kind, tensor, peer

    def batch_isend_irecv(self, operations: list[tuple]) -> list[SimpleNamespace]:
        for done in self.own.broadcasts:
            assert done.wait(TIMEOUT_S), "a broadcast that waits for an exchange after it"
        return [SimpleNamespace(wait=self._begin(*operation)) for operation in operations]

    def _begin(self, kind: str, tensor: torch.Tensor, peer: int) -> Any:
        if kind == "send":
            taken = threading.Event()
            self._sent[self.own.rank, peer].put((tensor, taken))
            return lambda: taken.wait(TIMEOUT_S) or pytest.fail("nobody receives")
        sent = self._sent[peer, self.own.rank]

        def receive() -> None:
            source, taken = sent.get(timeout=TIMEOUT_S)
            tensor.copy_(source)
            taken.set()

        return receive


class Wire:
    """Stands in for the weight group of all members; what is sent is read when all have begun."""

    def __init__(self, exchanges: Exchanges, num_members: int, num_senders: int):
        self._exchanges = exchanges
        self._num_members, self._num_senders = num_members, num_senders
        self._begun: dict[int, dict[int, torch.Tensor | None]] = defaultdict(dict)
        self._done: dict[int, threading.Event] = defaultdict(threading.Event)
        """Of each broadcast; read and made only with the lock."""
        self._lock = threading.Lock()
        self._digests = [Queue[str]() for _ in range(num_members)]
        self.most_in_flight = 0

    def member(self, rank: int) -> SimpleNamespace:
        count, in_flight = itertools.count(), set[int]()

        def wait(number: int) -> None:
            with self._lock:
                done = self._done[number]
            assert done.wait(TIMEOUT_S), "a broadcast that not all begin"
            in_flight.discard(number)

        def begin(flat: torch.Tensor | None, sender: int) -> int:
            with self._lock:
                number = next(count)
                in_flight.add(number)
                self.most_in_flight = max(self.most_in_flight, len(in_flight))
                self._begun[number][rank] = flat
                if len(self._begun[number]) == self._num_members:
                    flats = self._begun.pop(number)
                    for member, other in flats.items():
                        if member >= self._num_senders:
                            other.copy_(flats[sender])
                    self._done[number].set()
                if rank < self._num_senders:
                    self._exchanges.own.broadcasts.append(self._done[number])
            return number

        return SimpleNamespace(
            rank=rank,
            sender=rank,
            num_trainer_ranks=0,
            device=CPU,
            begin=lambda buckets: None,
            buffer=lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8),
            broadcast=begin,
            pass_on=lambda num_bytes, sender: begin(None, sender),
            wait=wait,
            acknowledge=lambda version, digest: self._digests[rank].put(digest),
            acknowledged=lambda version: [
                self._digests[other].get(timeout=TIMEOUT_S) for other in range(1, self._num_senders)
            ],
        )


class Rank:
    """Makes the stream of one trainer rank, with the shards of the layout that it holds."""

    def __init__(self, layout: Layout, exchanges: Exchanges, rank: int):
        exchanges.own.rank, exchanges.own.broadcasts = rank, []
        own = [(index, entry) for index, entry in enumerate(layout) if rank in entry[0]]
        flat = torch.cat([torch.empty(0), *(shard(i, holders.index(rank), num) for i, (holders, num, _) in own)])
        parts = flat.split([num for _, (_, num, _) in own])  # neighbors in memory
        shards = {index: part for (index, _), part in zip(own, parts, strict=True)}
        parameters = {f"w{index}": tensor for index, tensor in shards.items()}
        places = {id(tensor): layout[index][0].index(rank) for index, tensor in shards.items()}
        parallelism = SimpleNamespace(
            is_holder=lambda tensor, is_expert: True, shard_index=lambda tensor, is_expert: (places[id(tensor)], 0)
        )
        self.stream = WeightStream(parameters, lambda name: part(layout, int(name[1:])), parallelism, CPU)

    def plan(self, bucket_bytes: int) -> tuple[Plan, list[int]]:
        """Returns the plan, and the ranks that send."""
        slots = self.stream.slots(bucket_bytes)
        members = sorted({0, *(rank for rank, _ in slots)})
        numbered = [(members.index(rank), num_tensors) for rank, num_tensors in slots]
        return Plan.of(self.stream.specs(), bucket_bytes=bucket_bytes, slots=numbered), members


def part(layout: Layout, index: int) -> Part:
    holders, num, num_tensors = layout[index]
    names = tuple(f"w{index}.{number}" for number in range(num_tensors))
    shapes = tuple(tuple(part.shape) for part in torch.empty(len(holders) * num).tensor_split(num_tensors))
    join = lambda shards: list(torch.cat(list(shards)).tensor_split(num_tensors))  # noqa: E731
    views = lambda whole: whole.tensor_split(num_tensors)  # noqa: E731
    return Part(names, None, join, order=(index,), shapes=shapes, is_plain=True, views=views)


def shard(index: int, place: int, num: int) -> torch.Tensor:
    return torch.arange(num, dtype=torch.float32) + 1000 * index + 100 * place


def receive(plan: Plan, wire: Wire) -> dict[str, torch.Tensor]:
    """Receives and returns all tensors as an engine does, two buckets ahead."""
    member = wire.member(plan.num_senders)
    flats = [torch.zeros(bucket.num_bytes, dtype=torch.uint8) for bucket in plan.buckets]
    begun = []
    for flat, bucket in zip(flats, plan.buckets, strict=True):
        begun.append(member.broadcast(flat, bucket.sender))
        if len(begun) > 2:
            member.wait(begun.pop(0))
    for one in begun:
        member.wait(one)
    return {n: tensor for flat, bucket in zip(flats, plan.buckets, strict=True) for n, tensor in unpack(bucket, flat)}


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, Layout]:
    world = draw(st.integers(2, 4))
    every = st.permutations(range(world)).flatmap(lambda ranks: st.integers(1, world).map(lambda n: tuple(ranks[:n])))
    any_size = st.integers(1, 3).flatmap(lambda tensors: st.tuples(st.integers(tensors, 40), st.just(tensors)))
    aligned = st.integers(1, 3).flatmap(lambda tensors: st.tuples(st.just(4 * tensors), st.just(tensors)))
    sizes = st.one_of(any_size, aligned)
    holders = st.one_of(st.just(tuple(range(world))), every)
    entry = st.builds(lambda holders, sizes: (holders, *sizes), holders, sizes)
    return world, draw(st.lists(entry, min_size=1, max_size=24))


ONE_AFTER_THE_OTHER = (2, [((0,), 4, 1)] * 12 + [((1,), 4, 1)] * 12)


@settings(max_examples=60, deadline=None)
@example(ONE_AFTER_THE_OTHER, 16, 16)
@example(ONE_AFTER_THE_OTHER, 100, 64)
@given(layouts(), st.sampled_from([16, 100, 400, 2000]), st.sampled_from([8, 64, 512]))
def test_all_arrives_from_ranks_that_gather_at_the_same_time(
    world_and_layout: tuple[int, Layout], bucket_bytes: int, run_bytes: int
) -> None:
    world, layout = world_and_layout
    exchanges = Exchanges(world)
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(world + 1) as pool:
        patch.setattr(module, "dist", exchanges)
        patch.setattr(module, "gather_json", exchanges.gather_json)
        patch.setattr(module, "_RUN_BYTES", run_bytes)
        ready: Queue[tuple[Plan, Wire]] = Queue()
        wires = [Wire(exchanges, num + 1, num) for num in range(world + 1)]

        def publish(rank: int) -> None:
            trainer = Rank(layout, exchanges, rank)
            plan, members = trainer.plan(bucket_bytes)
            stream, wire = trainer.stream, wires[len(members)]
            weights = stream.to_senders(bucket_bytes) if plan.num_senders > 1 else stream.spans_to_first()
            if rank == 0:
                ready.put((plan, wire))
            if rank in members:
                send(wire.member(members.index(rank)), plan, weights, version=1)
            assert not list(weights) or rank not in members

        received = pool.submit(lambda: receive(*ready.get(timeout=TIMEOUT_S)))
        for publishing in [pool.submit(publish, rank) for rank in range(world)]:
            publishing.result(3 * TIMEOUT_S)
        content = received.result(TIMEOUT_S)
    assert all(wire.most_in_flight <= 2 * num_senders + 1 for num_senders, wire in enumerate(wires))
    expected = {}
    for index, (holders, num, _) in enumerate(layout):
        shards = [shard(index, place, num) for place in range(len(holders))]
        made = part(layout, index)
        expected |= dict(zip(made.names, made.join(shards), strict=True))
    assert list(content) == list(expected)
    assert all(torch.equal(content[name], tensor) for name, tensor in expected.items())


def test_later_publications_have_the_numbers_of_then() -> None:
    names = ("q", "k")
    views = lambda whole: whole.view(2, 3, 4).split([2, 1], 1)  # noqa: E731  two groups of two rows and one
    join = lambda shards: [view.flatten(0, 1) for view in views(shards[0])]  # noqa: E731
    made = Part(names, None, join, shapes=((4, 4), (2, 4)), views=views)
    parameter = torch.nn.Parameter(torch.arange(24.0).view(6, 4))
    exchanges = Exchanges(1)
    exchanges.own.rank, exchanges.own.broadcasts = 0, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "dist", exchanges)
        patch.setattr(module, "gather_json", exchanges.gather_json)
        parallelism = SimpleNamespace(
            is_holder=lambda tensor, is_expert: True, shard_index=lambda tensor, is_expert: (0, 0)
        )
        stream = WeightStream({"qkv": parameter}, lambda name: made, parallelism, CPU)
        plan = Plan.of(stream.specs(), bucket_bytes=1000)

        def published() -> list[torch.Tensor]:
            ((bucket, flat),) = pack(plan, stream.spans_to_first(), CPU)
            return [tensor.clone() for _, tensor in unpack(bucket, flat)]

        for change in (lambda: None, lambda: parameter.data.mul_(2), lambda: setattr(parameter, "data", parameter + 1)):
            change()
            expected = join([parameter.detach()])
            assert all(torch.equal(*pair) for pair in zip(published(), expected, strict=True))
