"""Tests pairs over shared memory: every engine worker gets the same bytes, and no member waits for a dead one."""

import contextlib
import itertools
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lockstep.types.v1.pairs_pb2 import PairMember
from lockstep.types.v1.types_pb2 import WeightGroup as GroupMessage

from services.common.compat.torch import broadcast, gloo_group
from services.common.errors import Aborted, InternalError, InvalidInput, PreconditionFailed, Reason
from services.common.weights import pairs as sender_module
from services.common.weights.pair_link import NUM_BUFFERS
from services.common.weights.pairs import PairReceiver, PairSender, Spread
from services.common.weights.plan import Plan
from services.common.weights.store import ServedStore, StoreClient
from services.trainer.ranks.publish import Publication, send
from tests.common.weights.group_harness import CPU, digest_of, message, receive_pair, some_weights
from tests.support import PATIENCE_S, raises

WEIGHTS = some_weights()
PLAN = Plan.of(WEIGHTS, bucket_bytes=1 << 18)
TIMEOUT_S = 20.0
TOLD = "another member gave up|the other end of the pair, is gone"
_EPOCHS = itertools.count(1)


@pytest.fixture(scope="module")
def store() -> ServedStore:
    return ServedStore("127.0.0.1")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def pair_group(store: ServedStore, *, ranks: int = 1, workers: int = 1, timeout_s: float = TIMEOUT_S) -> GroupMessage:
    group = message(store.address, epoch=next(_EPOCHS), world_size=ranks + workers, timeout_s=timeout_s)
    group.backend, group.num_trainer_ranks = "pairs", ranks
    return group


def spreads(store: ServedStore, pool: ThreadPoolExecutor, num_ranks: int, senders: Sequence[int]) -> list[Spread]:
    """Returns for each trainer rank a function that broadcasts a bucket over a gloo group of these ranks.

    If there is only one rank, its function does nothing.
    """
    if num_ranks == 1:
        return [lambda flat, sender: None]
    name, timeout = f"ranks/{next(_EPOCHS)}", timedelta(seconds=PATIENCE_S)

    def make(rank: int) -> dist.ProcessGroup:
        own = dist.PrefixStore(name, StoreClient(store.address, PATIENCE_S))
        return gloo_group(own, rank, num_ranks, address="127.0.0.1", timeout=timeout)

    groups = list(pool.map(make, range(num_ranks)))
    return [lambda flat, sender, group=group: broadcast(group, flat, senders[sender]).wait() for group in groups]


class Members:
    """The trainer ranks and engine workers of one epoch, each of which works in a thread."""

    def __init__(
        self, store: ServedStore, pool: ThreadPoolExecutor, group: GroupMessage, senders: Sequence[int] = (0,)
    ):
        num_ranks = group.num_trainer_ranks
        spread = spreads(store, pool, num_ranks, senders)
        joining = [
            pool.submit(PairSender, group, rank=rank, device=CPU, senders=senders, spread=spread[rank])
            for rank in range(num_ranks)
        ]
        workers = range(num_ranks, group.world_size)
        joining += [pool.submit(PairReceiver, group, rank=rank, device=CPU) for rank in workers]
        members = [one.result(PATIENCE_S) for one in joining]
        self.ranks: list[PairSender] = members[:num_ranks]
        self.workers: list[PairReceiver] = members[num_ranks:]
        self._pool = pool

    def receive(self, plan: Plan, version: int, **settings: Any) -> list[Future]:
        return [self._pool.submit(receive_pair, worker, plan, version, **settings) for worker in self.workers]

    def send(self, plan: Plan, parts: Sequence[Any], version: int) -> list[Future[Publication]]:
        return [
            self._pool.submit(send, rank, plan, part, version=version)
            for rank, part in zip(self.ranks, parts, strict=True)
        ]

    def abort(self) -> None:
        for member in (*self.ranks, *self.workers):
            member.abort()


def require_equal(received: Future, publication: Publication) -> None:
    digest, weights = received.result(PATIENCE_S)
    assert digest == publication.digest
    for (name, tensor), (want_name, want) in zip(weights, WEIGHTS, strict=True):
        assert (name, tensor.dtype) == (want_name, want.dtype)
        assert torch.equal(tensor, want)


@contextlib.contextmanager
def aborted(why: str) -> Iterator[None]:
    with pytest.raises(Aborted, match=why) as caught:
        yield
    assert caught.value.reason is Reason.EPOCH_ABORTED


@pytest.mark.parametrize("in_place", [False, True])
def test_the_worker_gets_what_was_sent(store, pool, in_place) -> None:
    members = Members(store, pool, pair_group(store))
    for version in (1, 2, 2):
        received = members.receive(PLAN, version, in_place=in_place)
        (publication,) = (one.result(PATIENCE_S) for one in members.send(PLAN, [WEIGHTS], version))
        assert publication.digest == digest_of(PLAN, WEIGHTS)
        require_equal(received[0], publication)
    members.abort()


def test_buffers_are_gone_with_the_epoch(store, pool) -> None:
    def buffers() -> int:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            return sum("memfd:lockstep-pair" in line for line in maps)

    before = buffers()
    members = Members(store, pool, pair_group(store))
    received = members.receive(PLAN, 1, in_place=True)
    members.send(PLAN, [WEIGHTS], 1)[0].result(PATIENCE_S)
    received[0].result(PATIENCE_S)
    assert buffers() == before + 4  # two at each end
    members.abort()
    assert buffers() == before


def test_a_rank_packs_buckets_while_its_worker_maps_the_buffers(store, pool) -> None:
    has_packed = threading.Event()

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        in_buffers = sum(len(bucket.places) for bucket in PLAN.buckets[:NUM_BUFFERS])
        for number, named in enumerate(WEIGHTS, 1):
            yield named
            if number == in_buffers:
                has_packed.set()

    members = Members(store, pool, pair_group(store))
    (sending,) = members.send(PLAN, [gathered()], 1)
    assert has_packed.wait(PATIENCE_S)  # nobody receives yet
    require_equal(members.receive(PLAN, 1)[0], sending.result(PATIENCE_S))
    members.abort()


def test_larger_buckets_get_other_buffers(store, pool) -> None:
    """An epoch may have a publication of adapters alone, in small buckets, before one with the base."""
    small = Plan.of(WEIGHTS[:2], bucket_bytes=1 << 18)
    members = Members(store, pool, pair_group(store))
    for plan, weights in ((small, WEIGHTS[:2]), (PLAN, WEIGHTS), (small, WEIGHTS[:2])):
        received = members.receive(plan, 1, in_place=True)
        (publication,) = (one.result(PATIENCE_S) for one in members.send(plan, [weights], 1))
        assert publication.digest == received[0].result(PATIENCE_S)[0] == digest_of(plan, weights)
    members.abort()


def test_every_worker_gets_all_that_several_ranks_send(store, pool) -> None:
    """Tests four trainer ranks of which two send: the others, and their workers, get everything all the same."""
    a, b, c, d, e, f, g = WEIGHTS
    plan = Plan.of(WEIGHTS, bucket_bytes=1 << 20, slots=[(0, 2), (1, 2), (0, 1), (1, 1), (0, 1)])
    nothing: list[list] = [[], [], []]
    parts = [[[a, b], [e], [g]], nothing, nothing, [[c, d], [f], []]]
    members = Members(store, pool, pair_group(store, ranks=4, workers=4), senders=(0, 3))
    for version in (1, 2):
        received = members.receive(plan, version)
        first, *others = [one.result(PATIENCE_S) for one in members.send(plan, parts, version)]
        assert first.digest == digest_of(PLAN, WEIGHTS)
        assert {other.digest for other in others} == {""}
        for one in received:
            require_equal(one, first)
    members.abort()


def test_every_worker_gets_all_that_one_rank_sends(store, pool) -> None:
    taken: list[str] = []

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        """Yields what a rank that sends nothing has: it takes part in the gathers, at the sender's pace."""
        for name, _ in WEIGHTS:
            taken.append(name)
            yield name, torch.empty(0)

    members = Members(store, pool, pair_group(store, ranks=2, workers=2))
    received = members.receive(PLAN, 1)
    first, _ = [one.result(PATIENCE_S) for one in members.send(PLAN, [WEIGHTS, gathered()], 1)]
    for one in received:
        require_equal(one, first)
    assert taken == [name for name, _ in WEIGHTS]
    members.abort()


def test_a_rank_without_a_worker_takes_part(store, pool) -> None:
    """Tests that after the loss of a replica the other workers get everything."""
    members = Members(store, pool, pair_group(store, ranks=2, workers=1))
    received = members.receive(PLAN, 1)
    first, _ = [one.result(PATIENCE_S) for one in members.send(PLAN, [WEIGHTS, WEIGHTS], 1)]
    require_equal(received[0], first)
    members.abort()


def test_ranks_whose_pairs_broke_take_part_to_the_end(store, pool) -> None:
    """If they did not, the other ranks would wait for them in a collective, which cannot be ended early."""
    members = Members(store, pool, pair_group(store, ranks=2, workers=2))
    members.workers[1].abort()
    received = members.receive(PLAN, 1)
    for one in (*members.send(PLAN, [WEIGHTS, WEIGHTS], 1), received[1]):
        with aborted(f"{TOLD}|was aborted"):
            one.result(PATIENCE_S)
    # The other worker may have received all before it was told; it is never asked to commit.
    assert received[0].exception(PATIENCE_S) is None or isinstance(received[0].exception(), Aborted)


def test_members_agree_if_the_first_rank_and_all_workers_bring_the_same(store, pool) -> None:
    members = Members(store, pool, pair_group(store, ranks=2, workers=2))
    those = [members.ranks[0], *members.workers]
    for values, agree in (([(5, -7)] * 3, True), ([(5, -7), (5, -7), (5, -8)], False), ([(0, 0)] * 3, True)):
        assert set(pool.map(lambda member, value: member.agrees(value), those, values)) == {agree}
    members.abort()


@pytest.mark.parametrize("pair", [0, 1])
def test_bytes_that_change_on_the_way_are_noticed(store, pool, monkeypatch, pair) -> None:
    written = PairSender._tell_written

    def flipped(self: PairSender) -> None:
        assert self._buffers is not None
        self._buffers.tensors[self._num_sent % 2][3] ^= self.rank == pair
        written(self)

    monkeypatch.setattr(PairSender, "_tell_written", flipped)
    members = Members(store, pool, pair_group(store, ranks=2, workers=2))
    received = members.receive(PLAN, 1)
    with pytest.raises(PreconditionFailed) as caught:
        members.send(PLAN, [WEIGHTS, WEIGHTS], 1)[0].result(PATIENCE_S)
    assert caught.value.reason is Reason.DIGEST_MISMATCH
    digests = [one.result(PATIENCE_S)[0] for one in received]
    assert [digest == caught.value.metadata["sent"] for digest in digests] == [pair == 1, pair == 0]
    members.abort()


@pytest.mark.parametrize("who", ["worker", "rank"])
def test_a_member_that_never_comes_aborts_the_others_within_the_timeout(store, pool, who) -> None:
    members = Members(store, pool, pair_group(store, timeout_s=1.0))
    with raises(Aborted) as caught:
        if who == "worker":
            members.send(PLAN, [WEIGHTS], 1)[0].result(PATIENCE_S)
        else:
            members.receive(PLAN, 1)[0].result(PATIENCE_S)
    assert caught.value.metadata["absent"] == ("1" if who == "worker" else "0")
    members.abort()


def test_a_worker_on_another_device_is_refused(store, pool, monkeypatch) -> None:
    meet = PairSender._meet_members

    def elsewhere(self: PairSender, own: PairMember) -> list[PairMember]:
        return meet(self, PairMember(device="GPU-of-another-host", socket=own.socket))

    monkeypatch.setattr(PairSender, "_meet_members", elsewhere)
    with raises(InvalidInput, field="placement"):
        Members(store, pool, pair_group(store))


def test_a_plan_that_the_other_end_does_not_have_is_refused(store, pool) -> None:
    members = Members(store, pool, pair_group(store))
    received = members.receive(Plan.of(WEIGHTS[::-1], bucket_bytes=1 << 18), 1)
    sending = members.send(PLAN, [WEIGHTS], 1)
    with aborted("in place of bucket"):
        received[0].result(PATIENCE_S)
    with aborted(TOLD):
        sending[0].result(PATIENCE_S)


def test_an_error_of_the_sender_is_raised(store, pool) -> None:
    members = Members(store, pool, pair_group(store))
    received = members.receive(PLAN, 1)
    with pytest.raises(InternalError, match="export order changed"):
        members.send(PLAN, [WEIGHTS[::-1]], 1)[0].result(PATIENCE_S)
    members.ranks[0].kill()
    members.ranks[0].abort()
    with aborted(TOLD):
        received[0].result(PATIENCE_S)


def test_visitors_without_the_secret_are_not_let_in(store, pool, monkeypatch) -> None:
    begun = sender_module.Listener.__init__

    def visited(self: sender_module.Listener) -> None:
        begun(self)
        visitor = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        visitor.connect(b"\0" + self.name.encode())
        visitor.send(sender_module.pb.PairMessage(hello=sender_module.pb.PairHello(rank=1)).SerializeToString())
        visitors.append(visitor)

    visitors: list[socket.socket] = []
    monkeypatch.setattr(sender_module.Listener, "__init__", visited)
    members = Members(store, pool, pair_group(store))
    received = members.receive(PLAN, 1)
    publication = members.send(PLAN, [WEIGHTS], 1)[0].result(PATIENCE_S)
    require_equal(received[0], publication)
    (visitor,) = visitors
    visitor.settimeout(PATIENCE_S)
    assert visitor.recv(1) == b""
    visitor.close()
    members.abort()


class Worker:
    """Runs an engine worker's end of a pair in a process of its own."""

    def __init__(self, store: ServedStore):
        self._store = store.address
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.common.weights.group_harness"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.answer() == {}

    def order(self, group: GroupMessage, receive: dict[str, int] | None) -> None:
        order = {
            "epoch": group.epoch,
            "rank": 1,
            "world_size": 2,
            "port": self._store.port,
            "secret": self._store.secret.hex(),
            "timeout_s": TIMEOUT_S,
            "pairs": 1,
            "receive": receive,
        }
        assert self.process.stdin
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, str]:
        assert self.process.stdout
        return json.loads(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


@pytest.mark.slow
def test_a_rank_outlives_a_worker_that_is_killed_in_a_publication(store) -> None:
    size = {"num_large": 16, "large": 1 << 18}
    weights = some_weights(**size)
    plan = Plan.of(weights, bucket_bytes=1 << 20)

    def joined(group: GroupMessage) -> PairSender:
        return PairSender(group, rank=0, device=CPU, senders=[0], spread=lambda flat, sender: None)

    worker, group = Worker(store), pair_group(store)
    worker.order(group, receive=size)
    whole = joined(group)
    assert send(whole, plan, weights, version=group.epoch).digest == digest_of(plan, weights)
    assert [worker.answer(), worker.answer()] == [{"joined": group.epoch}, {"digest": digest_of(plan, weights)}]

    group = pair_group(store)
    worker.order(group, receive=None)  # joins, and never receives
    broken = joined(group)
    assert worker.answer() == {"joined": group.epoch}
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send, broken, plan, weights, version=group.epoch)
        with pytest.raises(TimeoutError):
            sending.result(0.5)  # it does wait for the worker
        worker.kill()
        with aborted("the other end of the pair, is gone"):
            sending.result(PATIENCE_S)

    another, group = Worker(store), pair_group(store)
    another.order(group, receive=size)
    assert send(joined(group), plan, weights, version=group.epoch).digest == digest_of(plan, weights)
    assert [another.answer(), another.answer()] == [{"joined": group.epoch}, {"digest": digest_of(plan, weights)}]
    another.kill()
