"""Sends weights to the engine worker on this trainer rank's device.

Every rank has a worker of its own, which needs all weights. The plan's sender of a bucket packs it, the ranks spread it
among themselves over their own process group, and each hands it to its worker. All ranks run these collectives, and
those that gather the weights, in the same order. A rank with a broken pair therefore takes part to the end, and raises
only then.
"""

import hmac
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from lockstep.types.v1 import pairs_pb2 as pb
from lockstep.types.v1 import types_pb2

from services.common.errors import Aborted, InvalidInput
from services.common.weights.group import Epoch, Transfer
from services.common.weights.pair_link import (
    NUM_BUFFERS,
    Link,
    Listener,
    MappedBuffers,
    OwnedBuffers,
    device_name,
    make_buffers,
    map_buffers,
    partners,
)
from services.common.weights.plan import Bucket

PAIRS = "pairs"
"""Names this transport in a WeightGroup message."""


class PairEnd(Epoch):
    """A member of a weight group in which engine workers share devices with trainer ranks."""

    _link: Link | None = None
    _partner = -1  # rank of the other end in the weight group
    _num_agreed = 0

    def agrees(self, values: Sequence[int]) -> bool:
        """Returns whether the first trainer rank and all engine workers, the only callers, pass the same integers."""
        # A key of its own for each comparison, because the store still has the values of the one before.
        name, self._num_agreed = f"agree/{self._num_agreed}", self._num_agreed + 1
        ranks = (0, *range(self.num_trainer_ranks, self.world_size))
        own = " ".join(map(str, values))
        return len(set(self._exchange(name, own, ranks, "all members to compare what they hold"))) == 1

    def _meet_members(self, own: pb.PairMember) -> list[pb.PairMember]:
        """Tells all members about this one. Returns all of them, in the order of their ranks."""
        encoded, ranks = own.SerializeToString().hex(), range(self.world_size)
        members = self._exchange("pair", encoded, ranks, "all members to name their devices")
        return [pb.PairMember.FromString(bytes.fromhex(member.decode())) for member in members]

    def _exchange(self, name: str, own: str, ranks: Sequence[int], what: str) -> list[bytes]:
        """Puts a value into the store. Waits for those of the members `ranks`, and returns them in this order."""
        keys = [f"{name}/{rank}" for rank in ranks]
        with self._store_at_hand():
            self._store.set(f"{name}/{self.rank}", own)
        self._wait_until(lambda: self._store.check(keys), what, keys)
        with self._store_at_hand():
            return self._store.multi_get(keys)

    def _send(self, message: pb.PairMessage, fds: Sequence[int] = ()) -> None:
        try:
            self._open_link().send(message, fds)
        except OSError as error:
            self._give_up(f"member {self._partner}, the other end of the pair, is gone: {error}", cause=error)

    def _next(self, what: str) -> tuple[pb.PairMessage, list[int]]:
        """Waits for the next message of the other end."""
        link = self._open_link()
        name = f"member {self._partner} {what}"
        self._wait_until(link.has_message, name, partner=self._partner, pause=link.has_message)
        try:
            return link.receive()
        except OSError as error:
            self._give_up(f"member {self._partner}, the other end of the pair, is gone: {error}", cause=error)

    def _expect(self, kind: str, what: str) -> pb.PairMessage:
        """Waits for the next message, which must be of this kind and bring no file descriptors."""
        message, fds = self._next(what)
        for fd in fds:
            os.close(fd)
        if message.WhichOneof("kind") != kind:
            self._give_up(f"member {self._partner} sent {message.WhichOneof('kind')} instead of {kind}")
        return message

    def _open_link(self) -> Link:
        if self._link is None:
            raise Aborted(f"epoch {self.epoch} was aborted", epoch=self.epoch)
        return self._link

    def _disconnect(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()


class PairReceiver(PairEnd):
    """The engine worker's end of a pair."""

    _buffers: MappedBuffers | None = None

    def receive(self, buckets: Sequence[Bucket], *, in_place: bool) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Receives `buckets` and yields each with its bytes.

        With `in_place`, they may be overwritten as soon as the next bucket is asked for. They are then read from the
        memory that the trainer rank packs them into.
        """
        most = max(bucket.num_bytes for bucket in buckets)
        for bucket in buckets:
            buffers, buffer = self._written(bucket, most)
            flat = buffers.tensors[buffer][: bucket.num_bytes]
            if not in_place:
                flat = flat.clone()
                self._tell_read(buffers, buffer)
            yield bucket, flat
            if in_place:
                self._tell_read(buffers, buffer)

    def free_buffers(self) -> bool:
        """Returns False: it frees nothing, because the buffers are the trainer rank's memory."""
        return False

    def acknowledge(self, version: int, digest: str) -> None:
        if self._buffers is not None and not self._buffers.is_kept:
            self._unmap()
        self._send(pb.PairMessage(unmapped=pb.PairUnmapped(digest=digest)))
        if self._partner != 0:  # rank 0 compares the digests; its own worker's comes to it faster on this way
            super().acknowledge(version, digest)

    def _written(self, bucket: Bucket, most: int) -> tuple[MappedBuffers, int]:
        """Waits for `bucket`. Returns the buffers and the number of the one that has it."""
        message, fds = self._next("to write a bucket")
        if message.WhichOneof("kind") == "buffers":
            self._map(message.buffers, fds, most)
            message = self._expect("written", "to write a bucket")
        written, buffers = message.written, self._buffers
        expected = pb.PairBucket(buffer=written.buffer, start=bucket.start, num_bytes=bucket.num_bytes)
        if buffers is None or written != expected or written.buffer >= len(buffers.tensors):
            got = " ".join(str(message).split())
            self._give_up(f"member {self._partner} sent {got or 'nothing'} in place of bucket {bucket.start}")
        buffers.wait_until_written(written.buffer)
        return buffers, written.buffer

    def _map(self, message: pb.PairBuffers, fds: Sequence[int], most: int) -> None:
        self._unmap()
        try:
            self._buffers = buffers = map_buffers(message, fds, self.device, least_bytes=most)
        except (InvalidInput, RuntimeError, OSError) as error:
            self._give_up(f"the buffers of member {self._partner} cannot be mapped: {error}", cause=error)
        self._send(pb.PairMessage(mapped=buffers.answer))

    def _tell_read(self, buffers: MappedBuffers, buffer: int) -> None:
        buffers.read(buffer)
        self._send(pb.PairMessage(read=pb.PairBucket(buffer=buffer)))

    def _connect(self, group: types_pb2.WeightGroup) -> None:
        own = pb.PairMember(device=device_name(self.device, self.rank - self.num_trainer_ranks))
        members = self._meet_members(own)
        self._partner = partners(members, self.num_trainer_ranks)[self.rank]
        try:
            self._link = Link.to(members[self._partner].socket)
        except OSError as error:
            self._give_up(f"member {self._partner}, the other end of the pair, cannot be reached: {error}", cause=error)
        self._send(pb.PairMessage(hello=pb.PairHello(store_secret=group.store_secret, rank=self.rank)))

    def _disconnect(self) -> None:
        self._unmap()
        super()._disconnect()

    def _unmap(self) -> None:
        buffers, self._buffers = self._buffers, None
        if buffers is not None:
            buffers.unmap()


# Broadcasts the tensor from the plan's sender of this number to all trainer ranks, in place.
Spread = Callable[[torch.Tensor, int], None]

# GPU memory that the other end may still map, because the epoch has ended. It is freed when the next epoch has formed,
# which the other end joins only after it has left this one.
_graveyard: list[OwnedBuffers] = []


class PairSender(PairEnd):
    """The trainer rank's end of a pair; all trainer ranks send at the same time."""

    def __init__(
        self, group: types_pb2.WeightGroup, *, rank: int, device: torch.device, senders: Sequence[int], spread: Spread
    ):
        """Joins as `Epoch` does. `senders` lists the trainer ranks that are the plan's senders."""
        self.sender = senders.index(rank) if rank in senders else -1
        self._spread = spread
        self._buffers: OwnedBuffers | None = None
        self._is_mapped = False  # the other end has said that it mapped the buffers
        self._scratch: torch.Tensor | None = None  # takes the place of the buffers if there is no other end
        self._buckets: Sequence[Bucket] = ()
        self._num_sent = 0
        self._unread: deque[int] = deque()  # buffers that the other end has not read yet
        self._broken: Aborted | None = None
        self._received = ""  # digest of what the other end has received
        super().__init__(group, rank=rank, device=device)

    def begin(self, buckets: Sequence[Bucket]) -> None:
        self._buckets, self._num_sent = buckets, 0
        self._unless_broken(self._open_buffers)

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Returns the memory to pack the next bucket into, once the other end has read its content."""
        self._unless_broken(self._wait_for_buffer)
        if self._buffers is not None:
            return self._buffers.tensors[self._num_sent % NUM_BUFFERS][:num_bytes]
        if self._scratch is None or self._scratch.numel() < num_bytes:
            most = max(bucket.num_bytes for bucket in self._buckets)
            self._scratch = torch.empty(most, dtype=torch.uint8, device=self.device)
        return self._scratch[:num_bytes]

    def broadcast(self, flat: torch.Tensor, sender: int = 0) -> Transfer:
        """Hands a bucket that this rank has packed to all engine workers."""
        buffer = self.buffer(flat.numel())
        # A tensor that is alone in its bucket was not packed into the buffer.
        if buffer.data_ptr() != flat.data_ptr():
            buffer.copy_(flat)
        return self._hand_over(buffer, sender)

    def pass_on(self, num_bytes: int, sender: int) -> Transfer:
        """Hands a bucket that another rank packs to this rank's engine worker."""
        return self._hand_over(self.buffer(num_bytes), sender)

    def wait(self, transfer: Transfer) -> None:
        """Returns at once: the buffers are waited for when they are needed again."""

    def acknowledge(self, version: int, digest: str) -> None:
        self._finish()
        super().acknowledge(version, digest)

    def acknowledged(self, version: int) -> list[str]:
        self._finish()
        others = [rank for rank in range(1, self.world_size) if rank != self._partner]
        digests = {self._partner: self._received}
        digests |= zip(others, self._acknowledged_by(others, version), strict=True)
        return [digests[rank] for rank in range(1, self.world_size)]

    def _hand_over(self, buffer: torch.Tensor, sender: int) -> Transfer:
        self._spread(buffer, sender)
        self._unless_broken(self._tell_written)
        self._num_sent += 1
        return []

    def _unless_broken(self, action: Callable[[], None]) -> None:
        """Runs a step that involves the other end. A failure is raised at the end only, as the other ranks go on."""
        if self._partner < 0 or self._broken is not None:
            return
        try:
            action()
        except Aborted as error:
            self._broken = error
        except (RuntimeError, OSError, ValueError) as error:  # CUDA's or the host's memory, or a wrong handle
            self.kill()
            self.abort()
            message = f"epoch {self.epoch}, member {self.rank}: {error}"
            self._broken = Aborted(message, epoch=self.epoch)
            self._broken.__cause__ = error

    def _open_buffers(self) -> None:
        most = max(bucket.num_bytes for bucket in self._buckets)
        if self._buffers is not None and self._buffers.message.buffer_bytes >= most:
            return
        self._discard_buffers()
        self._buffers, self._is_mapped = make_buffers(most, self.device), False
        self._send(pb.PairMessage(buffers=self._buffers.message), self._buffers.fds)

    def _wait_for_buffer(self) -> None:
        # A second call for the same bucket does not wait again.
        if len(self._unread) == NUM_BUFFERS:
            self._take_read()
        if self._buffers is not None and self._num_sent >= NUM_BUFFERS:
            self._buffers.wait_until_read(self._num_sent % NUM_BUFFERS)

    def _tell_written(self) -> None:
        buffer, bucket = self._num_sent % NUM_BUFFERS, self._buckets[self._num_sent]
        assert self._buffers is not None, "begin has made them"
        self._buffers.written(buffer)
        written = pb.PairBucket(buffer=buffer, start=bucket.start, num_bytes=bucket.num_bytes)
        self._send(pb.PairMessage(written=written))
        self._unread.append(buffer)

    def _take_read(self) -> None:
        if not self._is_mapped:  # buckets are packed meanwhile
            assert self._buffers is not None, "begin has made them"
            self._buffers.mapped(self._expect("mapped", "to map the buffers").mapped)
            self._is_mapped = True
        buffer = self._expect("read", "to read a bucket").read.buffer
        if buffer != self._unread.popleft():
            self._give_up(f"member {self._partner} has read buffer {buffer} out of order")

    def _finish(self) -> None:
        """Waits until the other end has read all buffers."""
        self._scratch = None
        self._unless_broken(self._finish_pair)
        if self._broken is not None:
            raise self._broken

    def _finish_pair(self) -> None:
        while self._unread:
            self._take_read()
        self._received = self._expect("unmapped", "to load everything").unmapped.digest
        if self._buffers is not None and not self._buffers.message.is_kept:
            buffers, self._buffers = self._buffers, None
            buffers.free()

    def _connect(self, group: types_pb2.WeightGroup) -> None:
        listener = Listener()
        try:
            members = self._meet_members(
                pb.PairMember(device=device_name(self.device, self.rank), socket=listener.name)
            )
            trainer_of = partners(members, self.num_trainer_ranks)
            self._partner = next((worker for worker, rank in trainer_of.items() if rank == self.rank), -1)
            while self._partner >= 0 and self._link is None:
                self._wait_until(listener.has_connection, f"member {self._partner} to connect", partner=self._partner)
                self._link = listener.accept()
                if self._link is not None and not self._is_partner(group.store_secret):
                    super()._disconnect()
        finally:
            listener.close()
        while _graveyard:
            _graveyard.pop().free()

    def _is_partner(self, secret: bytes) -> bool:
        hello = self._expect("hello", "to say who it is").hello
        return hello.rank == self._partner and hmac.compare_digest(hello.store_secret, secret)

    def _disconnect(self) -> None:
        super()._disconnect()
        self._discard_buffers()

    def _discard_buffers(self) -> None:
        buffers, self._buffers = self._buffers, None
        if buffers is not None and self.device.type == "cuda":
            _graveyard.append(buffers)
        elif buffers is not None:
            buffers.free()
