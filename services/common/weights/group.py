"""Implements the weight group: trainer and engine workers in one broadcast group that is recreated for every epoch.

The members of an epoch meet in a store that the trainer serves. A member that fails or waits too long sets the epoch's
kill key and aborts. The other members check the key while they wait, so none of them waits for a dead member. Classes
that derive from `Epoch`, here and in `pairs.py`, implement how weights travel between the members.

gloo and NCCL share one code path; only the backend object differs. The group does not touch the global state of
torch.distributed, so it can exist next to Megatron in a trainer rank and inside a vLLM worker.
"""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from lockstep.types.v1 import types_pb2
from torch.distributed.distributed_c10d import PrefixStore

from services.common.compat.torch import allreduce, broadcast, gloo_group, nccl_group
from services.common.errors import Aborted, InvalidInput
from services.common.rpc.address import route_to
from services.common.weights.plan import Bucket
from services.common.weights.store import ONLY_IPV4, StoreAddress, StoreClient

# Limits of the polling interval. torch offers no event for the end of a collective or for a key in the store.
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 5e-5, 2e-3
_KILL_CHECK_S = 0.2
# Its value lists the members that were waited for in vain, if the one that gave up knows them.
_KILL_KEY = "killed"


class Epoch(ABC):
    """Takes part in one epoch as one member.

    Raises:
        Aborted: Not all members joined within the timeout, or one of them gave up. The metadata key `absent` has the
            ranks that did not come, separated by commas; it is empty if they are not known.
    """

    def __init__(self, group: types_pb2.WeightGroup, *, rank: int, device: torch.device):
        self.epoch, self.rank, self.world_size = group.epoch, rank, group.world_size
        self.num_trainer_ranks = group.num_trainer_ranks  # members of a group of pairs; 0 in other groups
        self.device = device
        self._timeout_s = group.timeout_s
        client: StoreClient | None = None
        try:
            # Every epoch has its own client, because one that was blocked in a failed wait must not be used again.
            address = StoreAddress(group.store_host, group.store_port, group.store_secret)
            self._client = client = StoreClient(address, group.timeout_s)
            self._store = PrefixStore(f"{group.run_id}/{group.epoch}", client)
            self._store.set(f"member/{rank}", "1")
        except (OSError, RuntimeError) as error:
            if client is not None:
                client.leave()
            store = f"{group.store_host}:{group.store_port}"
            why = ONLY_IPV4 if group.store_host.startswith("[") else error
            message = f"epoch {group.epoch}, member {rank}: the trainer's store at {store} cannot be reached: {why}"
            raise Aborted(message, epoch=group.epoch, absent=rank) from error
        try:
            members = [f"member/{r}" for r in range(group.world_size)]
            self._wait_until(lambda: self._store.check(members), "all members to join", members)
            self._connect(group)
        except BaseException:
            self.kill()
            self.abort()
            raise

    def acknowledge(self, version: int, digest: str) -> None:
        """Tells rank 0 that this member has finished `version`, with the digest of its content or of its part."""
        with self._store_at_hand():
            self._store.set(f"ack/{version}/{self.rank}", digest)

    def acknowledged(self, version: int) -> list[str]:
        """Returns the digest that each member after rank 0 acknowledged.

        They come through the store, because vLLM returns answers of its first engine only.

        Raises:
            Aborted: A member did not acknowledge in time. The metadata key `absent` has the ranks of those.
        """
        return self._acknowledged_by(range(1, self.world_size), version)

    def _acknowledged_by(self, ranks: Sequence[int], version: int) -> list[str]:
        keys = [f"ack/{version}/{rank}" for rank in ranks]
        if not keys:
            return []
        self._wait_until(lambda: self._store.check(keys), "all members to acknowledge", keys)
        with self._store_at_hand():
            digests = [digest.decode() for digest in self._store.multi_get(keys)]
            for key in keys:  # the same version may be published again
                self._store.delete_key(key)
        return digests

    def kill(self, absent: str = "") -> None:
        """Makes every member of the epoch give up. Any thread of any member may call this."""
        with contextlib.suppress(RuntimeError):  # the store is gone; its other clients notice by themselves
            self._store.compare_set(_KILL_KEY, "", absent)  # keeps the ranks that an earlier kill has named

    def abort(self) -> None:
        """Leaves the epoch at once, even while weights are on their way."""
        self._client.leave()
        self._disconnect()

    @abstractmethod
    def _connect(self, group: types_pb2.WeightGroup) -> None:
        """Connects this member with the others, which are all there."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Ends the connections without waiting for anybody."""

    def _wait_until(
        self,
        done: Callable[[], bool],
        what: str,
        keys: Sequence[str] = (),
        *,
        partner: int | None = None,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """Waits until `done` returns true. `pause` waits for the given seconds, and may return early.

        The error can name the members that did not come in time if `keys` has a key of each, or if `partner` is the
        only one.
        """
        begin = time.monotonic()
        next_check = begin + _KILL_CHECK_S
        with self._store_at_hand():
            while not done():
                now = time.monotonic()
                if now > begin + self._timeout_s:
                    missing = [key.rpartition("/")[2] for key in keys if not self._store.check([key])]
                    absent = ",".join(missing) if partner is None else str(partner)
                    self._give_up(f"waited {self._timeout_s:g} s for {what}", absent)
                if now > next_check:
                    next_check = now + _KILL_CHECK_S
                    self._give_up_with_another(what)
                # A tenth of the time already waited: short waits end without delay, and long ones cost little CPU time.
                pause(min(max((now - begin) / 10, _SHORTEST_WAIT_S), _LONGEST_WAIT_S))

    def _give_up_with_another(self, what: str) -> None:
        if self._store.check([_KILL_KEY]):
            absent = self._store.get(_KILL_KEY).decode()
            self._give_up(f"another member gave up while this one waited for {what}", absent)

    @contextlib.contextmanager
    def _store_at_hand(self) -> Generator[None]:
        try:
            yield
        except RuntimeError as error:
            self._give_up(f"the trainer's store is gone ({error})", cause=error)

    def _give_up(self, why: str, absent: str = "", cause: BaseException | None = None) -> NoReturn:
        self.kill(absent)
        self.abort()
        if absent:
            why = f"{why}; missing: {absent}"
        raise Aborted(f"epoch {self.epoch}, member {self.rank}: {why}", epoch=self.epoch, absent=absent) from cause


# Buckets in memory at the same time: two being received and one being loaded.
_NUM_BUFFERS = 3
_DEPTH = _NUM_BUFFERS - 1
# Buckets are sent in parts of this size, so that a member that only relays a bucket needs memory for one part.
_PART_BYTES = 256 << 20
# Our own deadline comes first, with a message that names the wait; the backend's is the last resort.
_GLOO_MARGIN_S = 10.0
# gloo's destructor holds the GIL and waits for operations that its abort() does not end. Broken groups are therefore
# kept, with the time when their operations must have timed out.
_graveyard: list[tuple[float, dist.ProcessGroup]] = []


# A broadcast in progress, by its parts. Each keeps its memory, which nothing else may hold.
Transfer = list[tuple[torch.Tensor, dist.Work]]


class WeightGroup(Epoch):
    """Broadcasts weights between the members of one epoch. The first members are the senders."""

    _pg: dist.ProcessGroup | None = None
    _scratch: torch.Tensor | None = None  # buffer for buckets that this member only relays
    _buffers: Sequence[torch.Tensor] = ()  # buffers for buckets that are loaded from where they arrive
    _backend = ""

    @property
    def sender(self) -> int:
        """This member's number among the plan's senders."""
        return self.rank

    def begin(self, buckets: Sequence[Bucket]) -> None: ...

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Returns the memory to pack the next bucket into."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def broadcast(self, flat: torch.Tensor, sender: int = 0) -> Transfer:
        """Starts the broadcast of `flat` from member `sender`; `wait` finishes it.

        All members must start all broadcasts in the same order.
        """
        return self._begin(torch.split(flat, _part_sizes(flat.numel())), sender)

    def pass_on(self, num_bytes: int, sender: int) -> Transfer:
        """Takes part in the broadcast of a flat buffer that this member relays but does not use."""
        return self._begin([self._unused(size) for size in _part_sizes(num_bytes)], sender)

    def wait(self, transfer: Transfer) -> None:
        for _, work in transfer:
            self._wait(work)

    def agrees(self, values: Sequence[int]) -> bool:
        """Returns whether all members pass the same 64-bit integers. A collective call, ordered with the broadcasts."""
        if self._pg is None:
            raise Aborted(f"epoch {self.epoch} was aborted", epoch=self.epoch)
        own = torch.tensor(values, dtype=torch.int64, device=self.device)
        smallest = torch.cat([own, ~own])  # the minimum of ~x is ~(the maximum of x)
        self._wait(allreduce(self._pg, smallest, dist.ReduceOp.MIN))
        least, not_most = smallest.chunk(2)
        return torch.equal(least, ~not_most)

    def receive(self, buckets: Sequence[Bucket], *, in_place: bool) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Receives `buckets` and yields each with its bytes.

        With `in_place`, they may be overwritten as soon as the next bucket is asked for.
        """
        most = max(bucket.num_bytes for bucket in buckets)
        if in_place and not (self._buffers and self._buffers[0].numel() >= most):
            self._buffers = [self.buffer(most) for _ in range(_NUM_BUFFERS)]

        def post(index: int) -> tuple[torch.Tensor, Transfer]:
            size, sender = buckets[index].num_bytes, buckets[index].sender
            flat = self._buffers[index % _NUM_BUFFERS][:size] if in_place else self.buffer(size)
            return flat, self.broadcast(flat, sender)

        posted = [post(index) for index in range(len(buckets))[:_DEPTH]]
        for index, bucket in enumerate(buckets):
            flat, transfer = posted.pop(0)
            self.wait(transfer)
            if index + _DEPTH < len(buckets):
                posted.append(post(index + _DEPTH))
            yield bucket, flat

    def free_buffers(self) -> bool:
        """Frees the memory for receiving, which the next publication takes again. Returns True."""
        self._buffers = ()
        return True

    def acknowledge(self, version: int, digest: str) -> None:
        self._scratch = None
        super().acknowledge(version, digest)

    def acknowledged(self, version: int) -> list[str]:
        self._scratch = None
        return super().acknowledged(version)

    def _connect(self, group: types_pb2.WeightGroup) -> None:
        self._backend = group.backend
        try:
            self._pg = pg = self._make_backend(group.store_host, timedelta(seconds=group.timeout_s))
        except RuntimeError as error:  # a member died after it had joined
            self._give_up(f"the members could not connect: {error}", cause=error)
        # Proves that every member is connected before any weight is sent.
        count = torch.ones(1, device=self.device)
        self._wait(pg.allreduce([count]))
        if int(count.item()) != self.world_size:
            self._give_up(f"{int(count.item())} of {self.world_size} members answered")

    def _disconnect(self) -> None:
        pg, self._pg = self._pg, None
        if pg is None:
            return
        with contextlib.suppress(RuntimeError):  # already broken
            pg.abort()
        if self._backend == "gloo":
            now = time.monotonic()
            _graveyard[:] = [(until, dead) for until, dead in _graveyard if until > now]
            _graveyard.append((now + self._timeout_s + _GLOO_MARGIN_S + 5, pg))

    def _begin(self, parts: Sequence[torch.Tensor], sender: int) -> Transfer:
        if self._pg is None:
            raise Aborted(f"epoch {self.epoch} was aborted", epoch=self.epoch)
        return [(part, broadcast(self._pg, part, sender)) for part in parts]

    def _unused(self, num_bytes: int) -> torch.Tensor:
        """Returns a buffer for relaying. NCCL's broadcasts share it, as they run one by one; gloo's run in parallel."""
        if self._backend == "gloo":
            return self.buffer(num_bytes)
        if self._scratch is None or self._scratch.numel() < num_bytes:
            self._scratch = self.buffer(num_bytes)
        return self._scratch[:num_bytes]

    def _make_backend(self, host: str, timeout: timedelta) -> dist.ProcessGroup:
        if self._backend == "gloo":
            # The interface that reaches the store's host; loopback when everything is on one machine.
            address = route_to(host).address
            last_resort = timeout + timedelta(seconds=_GLOO_MARGIN_S)
            return gloo_group(self._store, self.rank, self.world_size, address=address, timeout=last_resort)
        if self._backend == "nccl":
            torch.cuda.set_device(self.device)
            # NCCL's watchdog ends the process.
            last_resort = max(timedelta(minutes=30), 10 * timeout)
            return nccl_group(self._store, self.rank, self.world_size, device=self.device, timeout=last_resort)
        raise InvalidInput(f"weight group backend {self._backend!r} is neither gloo nor nccl", field="backend")

    def _wait(self, work: dist.Work) -> None:
        # Asked again and again: a wait of the backend would not notice that another member has given up.
        self._wait_until(work.is_completed, "a broadcast")
        try:
            work.wait()  # gloo raises if a peer died; NCCL makes the current stream wait for the broadcast
        except RuntimeError as error:
            self._give_up(f"a broadcast failed: {error}", cause=error)


def _part_sizes(num_bytes: int) -> list[int]:
    """Returns the sizes of a broadcast's parts in bytes, which are the same on all members."""
    return [min(_PART_BYTES, num_bytes - begin) for begin in range(0, max(num_bytes, 1), _PART_BYTES)]
