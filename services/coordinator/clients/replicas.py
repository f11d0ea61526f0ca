"""Manages the rollout replicas of a run: which there are, why some do not serve, and how lost ones come back."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from lockstep.types.v1.types_pb2 import ModelCard

from services.common.config.run import Config
from services.common.errors import InvalidInput, LockstepError, Reason, Unavailable
from services.common.rpc.tls import LOCAL, Transport
from services.common.tasks import backoff_s, gather
from services.coordinator.clients.gpus import OwnGpus
from services.coordinator.clients.replica import PERMANENT_ERRORS, Replica, ReplicaState, why_not_open
from services.coordinator.runs.replicas import Note
from services.coordinator.runs.run import Restarts

log = logging.getLogger(__name__)


class Notes:
    """A note for each address whose replica does not serve."""

    def __init__(self) -> None:
        self.all: Mapping[str, Note] = {}
        self.changed: Callable[[], None] = lambda: None

    def used_names(self, addresses: Collection[str]) -> set[str]:
        """Returns the addresses by which the run knows the services at `addresses`."""
        return {(self.all[at].same_as if at in self.all else "") or at for at in addresses}

    def put(self, address: str, note: Note | None) -> bool:
        """Replaces the note of an address, or removes it. Returns whether that changes it."""
        if self.all.get(address) == note:
            return False
        others = {at: other for at, other in self.all.items() if at != address}
        self.all = {**others, address: note} if note else others
        self.changed()
        return True


class ReplicaSet:
    """The replicas of a run. One that is lost is reopened in the background, and serves from the next publication."""

    def __init__(
        self,
        addresses: Sequence[str],
        config: Config,
        transport: Transport = LOCAL,
        gpus: OwnGpus | None = None,
        started: Collection[str] = (),
    ):
        """An engine is opened while the engines hold `gpus`. The run restarts what listens at `started` itself."""
        self._gpus = gpus or OwnGpus()
        self.replicas = [Replica(address, config.timeouts, transport) for address in addresses]
        self.notes = Notes()
        """Why replicas that the run should have do not serve."""
        # No run waits for an engine that hangs again and again: those at `_given_up` used up config.restart.
        self._started, self._replacements, self._given_up = started, Restarts(config.restart), set[str]()
        self._config, self._transport = config, transport
        self._publishing: list[Replica] = []
        self._reviving: dict[str, asyncio.Task[None]] = {}
        self._closing: dict[str, asyncio.Task[None]] = {}
        self._last_failure = "nothing was published yet"
        self._replaced: LockstepError | None = None
        self._run_id, self._card = "", ModelCard()

    @property
    def num_dead(self) -> int:
        return sum(replica.state is ReplicaState.DEAD and replica.num_opens > 0 for replica in self.replicas)

    @property
    def members(self) -> list[Replica]:
        """Returns the replicas that can take part in a publication; those that leave only if there are no others."""
        same = same_services(self.replicas)
        living = [one for one in self.replicas if one.state is not ReplicaState.DEAD and one not in same]
        return [replica for replica in living if not replica.is_leaving] or living

    async def sleep_if_open(self, run_id: str) -> None:
        """Puts engines that an earlier session of the run left open to sleep, so that a trainer can take the GPUs."""

        async def sleep(replica: Replica) -> None:
            try:
                await replica.sleep(run_id)
            except Unavailable as error:  # it is started, and has no engine yet
                log.debug("replica %s is not asked to sleep: %s", replica.address, error.message)

        await gather(map(sleep, self.replicas))

    async def open(self, run_id: str, card: ModelCard) -> None:
        """Starts the engines of all replicas. Uses only one of several addresses of a service.

        Raises:
            LockstepError: The first failure. If a replica refuses its config, the message names the replica.
        """
        self._run_id, self._card = run_id, card

        async def open_named(replica: Replica) -> None:
            try:
                await replica.open(run_id, self._config, card)
            except InvalidInput as error:
                message = f"replica {replica.address}: {error.message}"
                raise InvalidInput(message, reason=error.reason, **error.metadata) from error

        await gather(map(open_named, self.replicas))
        self._drop_same()

    def set_replicas(self, addresses: Sequence[str]) -> None:
        """Makes the run's replicas those at `addresses`.

        A new one is opened in the background and takes part in publications from then on. One that is not in
        `addresses` gets no new groups while another one serves, and is dropped once its last group is finished. One
        that cannot be used (see `notes`) is not tried again while it stays in `addresses`.

        Raises:
            InvalidInput: An address is malformed, or the connection would be plaintext over a network.
        """
        known = {replica.address for replica in self.replicas}
        known |= {at for at, note in self.notes.all.items() if note.is_unused}
        fresh = [address for address in addresses if address not in known]
        # All are created before anything changes: a malformed address changes nothing.
        new = [Replica(address, self._config.timeouts, self._transport) for address in fresh]
        for address in set(self.notes.all).difference(addresses):  # so that they can be tried again
            self.notes.put(address, None)
        wanted = self.notes.used_names(addresses) | set(addresses)
        for replica in self.replicas:
            leaves = replica.address not in wanted
            if replica.is_leaving != leaves:
                log.info("replica %s %s", replica.address, "leaves the run" if leaves else "stays after all")
            replica.is_leaving = leaves
        for replica in new:
            address = replica.address
            log.info("replica %s is new: it joins the run with the first publication after it was opened", address)
            self.replicas.append(replica)
            self._reviving[address] = asyncio.create_task(self._revive(replica, restart=False))
        self.drop_leavers()

    @contextmanager
    def publishing(self) -> Iterator[list[Replica]]:
        """Yields the members of a publication. None of them is dropped inside of the block: its calls would end."""
        self._publishing = self.members
        try:
            yield self._publishing
        finally:
            self._publishing = []
            self.drop_leavers()

    def drop_leavers(self) -> None:
        """Drops replicas that leave: a dead one at once, others when they have no group left and another one serves."""
        # Groups must have somewhere to go: the last replica that serves is kept, even if it leaves.
        stay = any(one.state is ReplicaState.SERVING and not one.is_leaving for one in self.replicas)
        for replica in [one for one in self.replicas if one.is_leaving and one not in self._publishing]:
            is_dead = replica.state is ReplicaState.DEAD
            if is_dead or (stay and not replica.samples_in_flight):
                self.replicas.remove(replica)
                opening = self._reviving.pop(replica.address, None)
                self._closing[replica.address] = asyncio.create_task(self._close_run_on(replica, opening))

    def mark_dead(self, replica: Replica, why: LockstepError, *, restart: bool = False) -> None:
        """Stops sending groups to the replica, and reopens it when it comes back; with `restart`, on a new engine."""
        if replica.state is ReplicaState.DEAD:
            return
        self._last_failure = f"lost replica {replica.address}: {why.message}"
        log.warning("%s", self._last_failure)
        self.notes.put(replica.address, Note(f"lost: {why_not_open(why)}"))
        replica.state = ReplicaState.DEAD
        if restart and not self._replacements.take(replica.address):
            self._given_up.add(replica.address)
        if replica.is_leaving:
            self.drop_leavers()
            return
        self._reviving[replica.address] = asyncio.create_task(self._revive(replica, restart))

    async def drop_unreachable(self) -> int:
        """Checks every replica that is not DEAD. Returns how many did not answer."""
        living = [replica for replica in self.replicas if replica.state is not ReplicaState.DEAD]
        alive = await gather(replica.is_alive() for replica in living)
        for replica, is_alive in zip(living, alive, strict=True):
            if not is_alive:
                self.mark_dead(replica, Unavailable("it does not answer"))
        return alive.count(False)

    def refuse_newcomers(self, why: LockstepError) -> int:
        """Does without the members that have never served, if another one has; `why` failed every time with them.
        Returns how many.
        """
        newcomers = [replica for replica in self.members if not replica.has_served]
        if len(newcomers) == len(self.members):
            return 0
        for replica in newcomers:
            self._refuse(replica, Note(f"publications fail with it: {why.message}", is_unused=True))
        return len(newcomers)

    def check(self) -> None:
        """Raises RUN_REPLACED if another run has opened a replica that was to be reopened: this run must end."""
        if self._replaced:
            raise self._replaced

    async def await_restart(self) -> bool:
        """Returns whether a replica can take part in a publication. If none can, waits up to `timeouts.open_s` for one
        that the run itself is restarting.

        Raises:
            PreconditionFailed: RUN_REPLACED, as in `check`.
        """
        until = time.monotonic() + self._config.timeouts.open_s
        # Not where trainer and engines take turns: this publication is what gives the engines the GPUs that they start
        # on.
        while not self.members and (opening := self._restarting()) and not self._config.takes_turns:
            log.warning("no replica is left; waiting for %s to be restarted", ", ".join(opening))
            limit_s = max(0.0, until - time.monotonic())
            if not (await asyncio.wait(opening.values(), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED))[0]:
                break
            self.check()
        return bool(self.members)

    def no_replica(self, what: str) -> Unavailable:
        """Returns the error NO_REPLICA. If the run restarts one, its metadata has `service`: a new session has it."""
        service = {"service": "rollout"} if self._restarting() else {}
        return Unavailable(f"{what}; {self._last_failure}", reason=Reason.NO_REPLICA, **service)

    async def close(self) -> None:
        for task in self._reviving.values():
            task.cancel()
        await asyncio.gather(*self._reviving.values(), *self._closing.values(), return_exceptions=True)
        await gather(replica.close() for replica in self.replicas)

    def _restarting(self) -> dict[str, asyncio.Task[None]]:
        """Returns the tasks that open the replicas that the run has started and lost, by address."""
        lost = {one.address for one in self.replicas if one.state is ReplicaState.DEAD}
        awaited = lost.intersection(self._started, self._reviving) - self._given_up
        return {address: self._reviving[address] for address in sorted(awaited) if not self._reviving[address].done()}

    async def _revive(self, replica: Replica, restart: bool) -> None:
        # Retries without limit, until the service listens again and opens the run.
        what = "is back" if replica.num_opens else "has come"
        if closing := self._closing.get(replica.address):  # it left a moment ago, and its run is still being closed
            await asyncio.wait({closing})
        for num_retries in itertools.count():
            try:
                if restart:
                    await replica.close_run(self._run_id, opens_again=True)
                if not replica.num_opens:
                    await replica.identify()  # says at once what is wrong with the address
                async with self._gpus.opening_engine():
                    await replica.open(self._run_id, self._config, self._card)
                break
            except LockstepError as error:
                if not self._may_retry(replica, error):
                    return
            await asyncio.sleep(backoff_s(num_retries))
        self.notes.put(replica.address, None)
        self._drop_same()
        if replica not in self.replicas:
            return
        log.info("replica %s %s and waits for the next publication of weights", replica.address, what)

    def _may_retry(self, replica: Replica, error: LockstepError) -> bool:
        """Notes why a replica could not be opened. Returns whether that can change."""
        if error.reason is Reason.RUN_REPLACED and replica.num_opens:
            self._replaced = error
        is_permanent = isinstance(error, PERMANENT_ERRORS)
        if is_permanent and not replica.num_opens:
            self._refuse(replica, Note(error.message, is_unused=True))
            return False
        is_news = self.notes.put(replica.address, Note(why_not_open(error)))
        if self._replaced or is_permanent:
            log.error("cannot reopen replica %s: %s", replica.address, error.message)
            return False
        if is_news:
            log.warning("replica %s is not there yet: %s", replica.address, error.message)
        return True

    def _drop_same(self) -> None:
        for replica, used in same_services(self.replicas).items():  # their run stays open, as it is the same service
            why = f"the same service as {used.address}, which the run has already"
            self._refuse(replica, Note(why, is_unused=True, same_as=used.address))

    def _refuse(self, replica: Replica, note: Note) -> None:
        log.warning("replica %s is not used: %s", replica.address, note.why)
        self.notes.put(replica.address, note)
        self.replicas.remove(replica)
        # The run of a service with two names stays open.
        closing = replica.close() if note.same_as else self._close_run_on(replica, None)
        self._closing[replica.address] = asyncio.create_task(closing)

    async def _close_run_on(self, replica: Replica, reviving: asyncio.Task[None] | None) -> None:
        if reviving:
            reviving.cancel()
            await asyncio.gather(reviving, return_exceptions=True)
        try:
            await replica.close_run(self._run_id)  # also if it has not answered yet: its engine may be starting
        except LockstepError as error:  # its host may be gone
            log.info("run %s may still be open at %s: %s", self._run_id, replica.address, error.message)
        finally:
            await replica.close()
        log.info("replica %s has left the run", replica.address)


def same_services(replicas: Sequence[Replica]) -> dict[Replica, Replica]:
    """Returns every replica that is another name of one that the run uses, with that one."""
    living = [replica for replica in replicas if replica.state is not ReplicaState.DEAD and replica.incarnation]
    living.sort(key=lambda one: one.state is not ReplicaState.SERVING)  # the name that serves is kept
    used: dict[str, Replica] = {}
    firsts = {replica: used.setdefault(replica.incarnation, replica) for replica in living}
    return {replica: first for replica, first in firsts.items() if first is not replica}
