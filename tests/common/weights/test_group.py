"""Tests the weight group over gloo: all members get the same bytes, and none waits for a dead one."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from services.common.errors import Aborted, InvalidInput, PreconditionFailed, Reason
from services.common.weights import group as group_module
from services.common.weights.group import WeightGroup
from services.common.weights.plan import Plan
from services.common.weights.store import ServedStore, StoreAddress
from services.trainer.ranks.publish import send
from tests.common.weights.group_harness import CPU, digest_of, join_all, message, receive, some_weights
from tests.support import LIMITS_S, PATIENCE_S, free_port, raises

PLAN = Plan.of(some_weights(), bucket_bytes=1 << 18)
# Messages of a member that was told to give up. One that timed out says how long it waited.
TOLD = r"another member gave up|a broadcast failed"
# Timeout of groups that are broken while members wait. gloo's destructor may wait this long at exit.
TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def store() -> ServedStore:
    return ServedStore("127.0.0.1")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture(scope="module")
def next_epoch() -> Callable[[], int]:
    epochs = iter(range(1, 100))
    return lambda: next(epochs)


@contextlib.contextmanager
def aborted(why: str) -> Iterator[None]:
    with pytest.raises(Aborted, match=why) as caught:
        yield
    assert caught.value.reason is Reason.EPOCH_ABORTED


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Provides a function that waits until the given number of members wait in `_wait_until`."""
    begun: set[int] = set()
    is_one_more, wait_until = threading.Semaphore(0), WeightGroup._wait_until

    def counting(self: WeightGroup, done: Callable[[], bool], what: str, keys: Sequence[str] = ()) -> None:
        if not done() and self.rank not in begun:
            begun.add(self.rank)
            is_one_more.release()
        wait_until(self, done, what, keys)

    monkeypatch.setattr(WeightGroup, "_wait_until", counting)

    def wait(num_members: int) -> None:
        for _ in range(num_members):
            assert is_one_more.acquire(timeout=PATIENCE_S)

    return wait


def form(pool: ThreadPoolExecutor, store: ServedStore, epoch: int, world_size: int, **settings: float) -> list:
    group = message(store.address, epoch=epoch, world_size=world_size, **settings)
    return [future.result(PATIENCE_S) for future in join_all(pool, group, range(world_size))]


def form_for(pool: ThreadPoolExecutor, store: ServedStore, next_epoch: Callable[[], int]) -> tuple[list, float]:
    """Returns two members and their timeout: the first of LIMITS_S in which this machine can form their group."""
    for timeout_s in LIMITS_S:
        with contextlib.suppress(Aborted):
            return form(pool, store, next_epoch(), 2, timeout_s=timeout_s), timeout_s
    raise AssertionError("no group was formed")


def test_members_agree_if_all_bring_the_same(store, pool, next_epoch) -> None:
    members = form(pool, store, next_epoch(), 3)
    largest, smallest = (1 << 63) - 1, -(1 << 63)

    def answers(*values: tuple[int, int]) -> set[bool]:
        return set(pool.map(lambda member, value: member.agrees(value), members, values))

    assert answers(*[(largest, smallest)] * 3) == {True}
    for odd in range(3):  # the first and the last member too, in either value, above and below the others'
        for value in ((5, -6), (5, -8), (4, -7), (6, -7), (largest, -7), (5, smallest)):
            values = [(5, -7)] * 3
            values[odd] = value
            assert answers(*values) == {False}
    assert answers(*[(5, -7)] * 3) == {True}
    members[0].kill()
    with aborted(TOLD):
        members[1].agrees((5, -7))
    for member in members:
        member.abort()


def test_every_member_gets_what_was_sent(store, pool, next_epoch) -> None:
    first, *others = form(pool, store, next_epoch(), 3)
    received = [pool.submit(receive, group, PLAN, 7) for group in others]
    publication = send(first, PLAN, some_weights(), version=7)
    assert publication.digest == digest_of(PLAN, some_weights())
    assert publication.num_bytes == sum(tensor.nbytes for _, tensor in some_weights())
    for future in received:
        digest, weights = future.result()
        assert digest == publication.digest
        for (name, tensor), (want_name, want) in zip(weights, some_weights(), strict=True):
            assert (name, tensor.dtype) == (want_name, want.dtype)
            assert torch.equal(tensor, want)
    # The group stays: the next version travels in the same epoch, and so does the same one with other weights.
    received = [pool.submit(receive, group, PLAN, 8) for group in others]
    assert send(first, PLAN, some_weights(), version=8).digest == publication.digest
    changed = [(name, tensor + 1) for name, tensor in some_weights()]
    received = [pool.submit(receive, group, PLAN, 8) for group in others]
    assert send(first, PLAN, changed, version=8).digest == received[0].result()[0] != publication.digest


def two_senders() -> tuple[Plan, list[list[list[tuple[str, torch.Tensor]]]]]:
    """Returns a plan of two senders, whose slots alternate, and the weights that each of them has in each round."""
    a, b, c, d, e, f, g = weights = some_weights()
    plan = Plan.of(weights, bucket_bytes=1 << 20, slots=[(0, 2), (1, 2), (0, 1), (1, 1), (0, 1)])
    return plan, [[[a, b], [e], [g]], [[c, d], [f], []]]


def test_what_is_sent_may_be_freed_when_all_was_asked_for(store, pool, next_epoch) -> None:
    sent = torch.arange(1 << 18)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        lent = sent.clone()  # it is alone in its bucket, so it is sent without a copy
        yield "w", lent
        lent.untyped_storage().resize_(0)

    plan = Plan.of([("w", sent)], bucket_bytes=1 << 20)
    first, second = form(pool, store, next_epoch(), 2)
    received = pool.submit(receive, second, plan, 1)
    send(first, plan, weights(), version=1)
    assert torch.equal(received.result()[1][0][1], sent)


def test_what_several_send_is_as_if_one_had_sent_it(store, pool, next_epoch, monkeypatch) -> None:
    monkeypatch.setattr(group_module, "_PART_BYTES", 1000)  # what is sent is no multiple of this
    plan, parts = two_senders()
    assert [bucket.sender for bucket in plan.buckets] == [0, 1, 0, 1, 0]
    *senders, first, second = form(pool, store, next_epoch(), 4)
    for version in (1, 2):
        received = [pool.submit(receive, group, plan, version) for group in (first, second)]
        other = pool.submit(send, senders[1], plan, parts[1], version=version)
        publication = send(senders[0], plan, parts[0], version=version)
        assert publication.digest == digest_of(PLAN, some_weights())
        assert publication.num_bytes == other.result().num_bytes == sum(tensor.nbytes for _, tensor in some_weights())
        for future in received:
            digest, weights = future.result()
            assert digest == publication.digest
            assert all(torch.equal(got, want) for (_, got), (_, want) in zip(weights, some_weights(), strict=True))


def test_a_sender_that_gives_up_ends_it_for_all(store, pool, next_epoch) -> None:
    plan, parts = two_senders()
    *senders, first, second = form(pool, store, next_epoch(), 4, timeout_s=TIMEOUT_S)
    others = [pool.submit(receive, group, plan, 1) for group in (first, second)]
    others.append(pool.submit(send, senders[0], plan, parts[0], version=1))
    with pytest.raises(TimeoutError):
        others[0].result(0.2)  # they wait for the second sender
    senders[1].kill()
    for other in others:
        with aborted(TOLD):
            other.result()


class FlippingGroup(WeightGroup):
    """Sends one bit that differs from what was hashed, as broken memory or a broken network card does."""

    def broadcast(self, flat: torch.Tensor, sender: int = 0) -> dist.Work:
        flat[3] ^= 1
        return super().broadcast(flat, sender)


def test_bytes_that_change_on_the_way_are_noticed(store, pool, next_epoch) -> None:
    group = message(store.address, epoch=next_epoch(), world_size=2)
    other = pool.submit(WeightGroup, group, rank=1, device=CPU)
    first = FlippingGroup(group, rank=0, device=CPU)
    received = pool.submit(receive, other.result(), PLAN, 1)
    with raises(PreconditionFailed, reason=Reason.DIGEST_MISMATCH) as caught:
        send(first, PLAN, some_weights(), version=1)
    assert received.result()[0] != caught.value.metadata["sent"]


def test_absent_member_aborts_within_the_timeout(store, pool, next_epoch) -> None:
    group = message(store.address, epoch=next_epoch(), world_size=5, timeout_s=1.0)
    futures = join_all(pool, group, [0, 3])
    for future in futures:  # the first to give up tells the other whom it missed
        with raises(Aborted) as caught:
            future.result()
        assert caught.value.metadata["absent"] == "1,2,4"


@pytest.mark.long  # gloo waits ten seconds
def test_member_that_dies_while_the_group_forms_aborts_it(store, next_epoch) -> None:
    """Imitates a member that has announced itself in the store, but then connects to no other."""
    group = message(store.address, epoch=next_epoch(), world_size=2, timeout_s=1.0)
    dist.PrefixStore(f"{group.run_id}/{group.epoch}", store.tcp_store).set("member/1", b"1")
    with aborted("member 0"):
        WeightGroup(group, rank=0, device=CPU)


@pytest.mark.parametrize(("host", "why"), [("127.0.0.1", "refused"), ("[::1]", "weights travel over IPv4; give")])
def test_store_that_is_gone_aborts(host: str, why: str, next_epoch) -> None:
    group = message(StoreAddress(host, free_port(), b""), epoch=next_epoch(), world_size=2, timeout_s=1.0)
    with aborted(f"store at .* cannot be reached: .*{why}"):
        WeightGroup(group, rank=0, device=CPU)


def test_member_that_does_not_send_aborts_within_the_timeout(store, pool, next_epoch) -> None:
    (_, other), timeout_s = form_for(pool, store, next_epoch)
    with aborted(f"waited {timeout_s:g} s for a broadcast|a broadcast failed"):
        receive(other, PLAN, 1)
    # It is over for this member: a later message of that epoch cannot reach it.
    with pytest.raises(Aborted):
        other.broadcast(torch.zeros(16, dtype=torch.uint8))


def test_missing_acknowledgement_aborts_within_the_timeout(store, pool, next_epoch) -> None:
    (first, _), timeout_s = form_for(pool, store, next_epoch)
    with aborted(f"waited {timeout_s:g} s for all members to acknowledge"):
        first.acknowledged(1)


def test_kill_releases_everyone_who_waits(store, pool, next_epoch, request) -> None:
    first, second, third = form(pool, store, next_epoch(), 3, timeout_s=TIMEOUT_S)
    until_waiting = request.getfixturevalue("waiting")
    futures = [pool.submit(receive, second, PLAN, 1), pool.submit(first.acknowledged, 1)]
    until_waiting(2)
    third.kill()
    for future in futures:
        with aborted(TOLD):
            future.result()


def test_kill_releases_members_that_wait_for_another_to_join(store, pool, next_epoch, waiting) -> None:
    group = message(store.address, epoch=next_epoch(), world_size=3, timeout_s=TIMEOUT_S)
    futures = join_all(pool, group, [0, 1])
    waiting(2)
    dist.PrefixStore(f"{group.run_id}/{group.epoch}", store.tcp_store).set("killed", b"1")
    for future in futures:
        with aborted(TOLD):
            future.result()


def test_unknown_backend_is_refused(store, next_epoch) -> None:
    group = message(store.address, epoch=next_epoch(), world_size=1)
    group.backend = "carrier pigeon"
    with raises(InvalidInput, field="backend"):
        WeightGroup(group, rank=0, device=CPU)


class Member:
    """Runs group_harness in a process, and gives it commands."""

    def __init__(self, rank: int, store: StoreAddress):
        self._order = {"rank": rank, "port": store.port, "secret": store.secret.hex(), "timeout_s": TIMEOUT_S}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.common.weights.group_harness"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def order(self, epoch: int, world_size: int, receive: dict[str, int] | None) -> None:
        order = self._order | {"epoch": epoch, "world_size": world_size, "receive": receive}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, str]:
        return json.loads(self.process.stdout.readline())


@pytest.fixture
def members(store: ServedStore) -> Iterator[list[Member]]:
    members = [Member(rank, store.address) for rank in (1, 2)]
    assert [member.answer() for member in members] == [{}, {}]
    yield members
    for member in members:
        member.process.kill()
        member.process.communicate()


# The tests above show what ends a wait; test_pairs.py and whole runs kill processes.
@pytest.mark.long
def test_group_outlives_a_member_that_is_killed_in_a_broadcast(store, members, next_epoch) -> None:
    # These are 64 MiB in buckets of 1 MiB: more than the sockets between the members hold, so that the sender must wait
    # for the dead member.
    size = {"num_large": 64, "large": 1 << 18}
    weights = some_weights(**size)
    plan = Plan.of(weights, bucket_bytes=1 << 20)
    digest = digest_of(plan, weights)

    epoch = next_epoch()
    for member in members:
        member.order(epoch, 3, receive=size)
    whole = WeightGroup(message(store.address, epoch=epoch, world_size=3, timeout_s=TIMEOUT_S), rank=0, device=CPU)
    assert send(whole, plan, weights, version=epoch).digest == digest
    assert [(member.answer(), member.answer()) for member in members] == [({"joined": epoch}, {"digest": digest})] * 2

    epoch = next_epoch()
    members[0].order(epoch, 3, receive=size)
    members[1].order(epoch, 3, receive=None)  # joins, and never receives
    broken = WeightGroup(message(store.address, epoch=epoch, world_size=3, timeout_s=TIMEOUT_S), rank=0, device=CPU)
    assert [member.answer() for member in members] == [{"joined": epoch}] * 2
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send, broken, plan, weights, version=epoch)
        with pytest.raises(TimeoutError):
            sending.result(0.5)  # it does wait for the one that does not receive
        os.kill(members[1].process.pid, signal.SIGKILL)
        # gloo notices the closed connection at once, and the other members notice the kill key.
        with aborted(TOLD):
            sending.result()
        answer = members[0].answer()
        assert answer["error"] == "EPOCH_ABORTED"
        assert re.search(TOLD, answer["message"]), answer

    epoch = next_epoch()
    members[0].order(epoch, 2, receive=size)
    formed_again = WeightGroup(
        message(store.address, epoch=epoch, world_size=2, timeout_s=TIMEOUT_S), rank=0, device=CPU
    )
    assert send(formed_again, plan, weights, version=epoch).digest == digest
    assert [members[0].answer(), members[0].answer()] == [{"joined": epoch}, {"digest": digest}]
