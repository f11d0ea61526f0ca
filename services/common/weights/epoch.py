"""Implements membership in one epoch of a weight group: which members joined, gave up or acknowledged.

The members meet in a store that the trainer serves. A member that fails or waits too long sets the epoch's kill key and
aborts. The other members check the key while they wait, so none of them waits for a dead member. Classes that derive
from `Epoch`, in `group.py` and `pairs/`, implement how weights travel between the members.
"""

# pyright: reportPrivateImportUsage=false
# torch exports its stores without saying so.

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from lockstep.types.v1 import types_pb2

from services.common.errors import Aborted
from services.common.weights.store import StoreAddress, StoreClient

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
            self._store = dist.PrefixStore(f"{group.run_id}/{group.epoch}", client)
            self._store.set(f"member/{rank}", "1")
        except (OSError, RuntimeError) as error:
            if client is not None:
                client.leave()
            store = f"{group.store_host}:{group.store_port}"
            message = f"epoch {group.epoch}, member {rank}: the trainer's store at {store} cannot be reached: {error}"
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
