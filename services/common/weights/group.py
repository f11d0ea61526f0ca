"""Implements the weight group: trainer and engine workers in one broadcast group that is recreated for every epoch.

gloo and NCCL share one code path; only the backend object differs. The group does not touch the global state of
torch.distributed, so it can exist next to Megatron in a trainer rank and inside a vLLM worker.
"""

# pyright: reportPrivateImportUsage=false
# torch exports its stores and process groups without saying so.

import contextlib
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from lockstep.types.v1 import types_pb2

from services.common.compat.torch import allreduce, broadcast, gloo_group, nccl_group
from services.common.errors import Aborted, InvalidInput
from services.common.rpc.address import route_to
from services.common.weights.epoch import Epoch
from services.common.weights.plan import Bucket

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
        self._wait_until(work.is_completed, "a broadcast")
        try:
            work.wait()  # gloo raises if a peer died; NCCL makes the current stream wait for the broadcast
        except RuntimeError as error:
            self._give_up(f"a broadcast failed: {error}", cause=error)


def _part_sizes(num_bytes: int) -> list[int]:
    """Returns the sizes of a broadcast's parts in bytes, which are the same on all members."""
    return [min(_PART_BYTES, num_bytes - begin) for begin in range(0, max(num_bytes, 1), _PART_BYTES)]
