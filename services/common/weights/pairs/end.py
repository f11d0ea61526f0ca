"""Implements the parts that both ends of a pair share: they meet, wait for each other's messages, and compare
numbers."""

import os
from collections.abc import Sequence

from lockstep.types.v1 import pairs_pb2 as pb

from services.common.errors import Aborted
from services.common.weights.epoch import Epoch
from services.common.weights.pairs.link import Link


class PairEnd(Epoch):
    """Implements one member of a weight group in which engine workers share devices with trainer ranks."""

    _link: Link | None = None
    _partner = -1  # rank of the other end in the weight group
    _num_agreed = 0

    def agrees(self, values: Sequence[int]) -> bool:
        """Returns whether the first trainer rank and all engine workers, the only callers, pass the same integers.

        Raises:
            Aborted: A member failed, left or timed out.
        """
        name, self._num_agreed = f"agree/{self._num_agreed}", self._num_agreed + 1
        keys = [f"{name}/{rank}" for rank in (0, *range(self.num_trainer_ranks, self.world_size))]
        with self._store_at_hand():
            self._store.set(f"{name}/{self.rank}", " ".join(map(str, values)))
        self._wait_until(lambda: self._store.check(keys), "all members to compare what they hold", keys)
        with self._store_at_hand():
            return len(set(self._store.multi_get(keys))) == 1

    def _meet(self, own: pb.PairMember) -> list[pb.PairMember]:
        """Tells all members about this one. Returns all of them, in the order of their ranks."""
        keys = [f"pair/{rank}" for rank in range(self.world_size)]
        with self._store_at_hand():
            self._store.set(f"pair/{self.rank}", own.SerializeToString().hex())
        self._wait_until(lambda: self._store.check(keys), "all members to name their devices", keys)
        with self._store_at_hand():
            return [pb.PairMember.FromString(bytes.fromhex(member.decode())) for member in self._store.multi_get(keys)]

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
