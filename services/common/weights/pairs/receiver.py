"""Receives weights in an engine worker from the trainer rank on its device."""

from collections.abc import Iterator, Sequence

import torch
from lockstep.types.v1 import pairs_pb2 as pb
from lockstep.types.v1 import types_pb2

from services.common.errors import InvalidInput
from services.common.weights.pairs.buffers import MappedBuffers, map_buffers
from services.common.weights.pairs.end import PairEnd
from services.common.weights.pairs.link import Link
from services.common.weights.pairs.members import device_name, partners
from services.common.weights.plan import Bucket


class PairReceiver(PairEnd):
    """Implements the engine worker's end of a pair."""

    _buffers: MappedBuffers | None = None

    def receive(self, buckets: Sequence[Bucket], *, in_place: bool) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Receives `buckets` and yields each with its bytes.

        With `in_place`, they may be overwritten as soon as the next bucket is asked for. They are then read from the
        memory that the trainer rank packs them into.

        Raises:
            Aborted: The trainer rank failed, left or was too slow, or another member gave up.
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
        members = self._meet(own)
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
