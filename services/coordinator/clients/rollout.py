"""Calls all rollout replicas: dispatches by load, re-dispatches groups of dead replicas and revives replicas."""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager

from lockstep.rollout.v1 import rollout_pb2 as pb
from lockstep.types.v1.types_pb2 import ModelCard, PolicyStamp, SamplingParams

from services.common.config.run import Config
from services.common.config.streaming import orders_by_length
from services.common.errors import (
    DeadlineExceeded,
    LockstepError,
    PreconditionFailed,
    Reason,
    Unavailable,
)
from services.common.files.transfer import require_sealed
from services.common.rpc.tls import LOCAL, Transport
from services.common.tasks import backoff_s, gather
from services.coordinator.clients.gpus import OwnGpus, Side
from services.coordinator.clients.replica import (
    PERMANENT_ERRORS,
    Affinity,
    Notes,
    Replica,
    ReplicaState,
    open_named,
    require_kept,
    same_services,
    sampled_group,
    why_not_open,
)
from services.coordinator.data.groups import SampledGroup
from services.coordinator.data.prompts import Prompt
from services.coordinator.runs.clock import Busy
from services.coordinator.runs.replicas import Note
from services.coordinator.runs.run import Restarts

log = logging.getLogger(__name__)

# Number of samples sent to a replica, as a multiple of those its engine runs at once, so that the slots of finished
# samples are refilled at once instead of waiting for the slowest sample of a group.
_IN_FLIGHT_FACTOR = 2


class Rollout:
    """Dispatches each group to the serving replica with the fewest tokens in flight, or to its affinity's."""

    def __init__(
        self,
        addresses: Sequence[str],
        config: Config,
        transport: Transport = LOCAL,
        gpus: OwnGpus | None = None,
        started: Collection[str] = (),
    ):
        """Generating holds `gpus` for the engines. The run restarts the replicas at the addresses `started` itself."""
        self._gpus = gpus or OwnGpus()
        self.replicas = [Replica(address, config.timeouts, transport) for address in addresses]
        self.num_redispatched, self.busy = 0, Busy()
        self.lengths: dict[str, int] = {}
        """A lower bound of the tokens of each group's longest sample, by prompt id, if blocks need it."""
        self.before_publication: Callable[[], Awaitable[None]] | None = None
        """Reads the list of replicas that the run should have."""
        self.publish_again: Callable[[], Awaitable[object]] | None = None
        """Publishes the weights that groups are sampled from once more, if the trainer still has them."""
        self.notes = Notes()
        """Says why replicas that the run should have do not serve."""
        # No run waits for an engine that hangs again and again: those at `_given_up` used up config.restart.
        self._started, self._replacements, self._given_up = started, Restarts(config.restart), set[str]()
        self._recovering = asyncio.Lock()
        self._config, self._transport = config, transport
        self._reports_unfinished = orders_by_length(config)
        self._changed = asyncio.Condition()
        self._reviving: dict[str, asyncio.Task[None]] = {}
        self._closing: dict[str, asyncio.Task[None]] = {}
        self._last_failure = "nothing was published yet"
        self._replaced: LockstepError | None = None
        self._run_id, self._card = "", ModelCard()

    @property
    def num_dead(self) -> int:
        """Returns the number of replicas that were lost and have not come back."""
        return sum(replica.state is ReplicaState.DEAD and replica.num_opens > 0 for replica in self.replicas)

    @property
    def members(self) -> list[Replica]:
        """Returns the replicas that can take part in a publication; those that leave only if there are no others."""
        same = same_services(self.replicas)
        living = [one for one in self.replicas if one.state is not ReplicaState.DEAD and one not in same]
        return [replica for replica in living if not replica.is_leaving] or living

    async def open(self, run_id: str, card: ModelCard) -> None:
        """Starts the engines of all replicas. Uses only one of several addresses of a service.

        Raises:
            LockstepError: The first failure. If a replica refuses its config, the message names the replica.
        """
        self._run_id, self._card = run_id, card
        await gather(open_named(replica, run_id, self._config, card) for replica in self.replicas)
        self._drop_same()

    def set_replicas(self, addresses: Sequence[str]) -> None:
        """Makes the run's replicas those at `addresses`.

        A new one is opened in the background and takes part in publications from then on. One that is not in
        `addresses` gets no new groups while another one serves, and is dropped once its last group is finished. One
        that cannot be used (see `notes`) is not tried again while it stays in `addresses`.

        Raises:
            InvalidInput: An address is malformed, or the connection would be plaintext over a network.
        """
        known = {replica.address: replica for replica in self.replicas}
        fresh = [at for at in addresses if at not in known and not self.notes.is_unused(at)]
        new = [Replica(address, self._config.timeouts, self._transport) for address in fresh]
        self.notes.keep_only(addresses)
        wanted = self.notes.used_names(addresses) | set(addresses)
        for address, replica in known.items():
            leaves = address not in wanted
            if replica.is_leaving != leaves:
                log.info("replica %s %s", address, "leaves the run" if leaves else "stays after all")
            replica.is_leaving = leaves
        for replica in new:
            log.info(
                "replica %s is new: it joins the run with the first publication after it was opened", replica.address
            )
            self.replicas.append(replica)
            self._reviving[replica.address] = asyncio.create_task(self._revive(replica, restart=False))
        self.drop_leavers()

    def drop_leavers(self) -> None:
        """Drops replicas that leave: a dead one at once, others when they have no group left and another one serves."""
        stay = any(one.state is ReplicaState.SERVING and not one.is_leaving for one in self.replicas)
        for replica in [replica for replica in self.replicas if replica.is_leaving]:
            is_dead = replica.state is ReplicaState.DEAD
            if is_dead or (stay and not replica.samples_in_flight):
                self.replicas.remove(replica)
                opening = self._reviving.pop(replica.address, None)
                self._closing[replica.address] = asyncio.create_task(self._close_run_on(replica, opening))

    async def generate(
        self,
        index: int,
        prompt: Prompt,
        seeds: Sequence[int],
        sampling: SamplingParams,
        stamp: PolicyStamp,
        affinity: Affinity | None = None,
    ) -> SampledGroup:
        """Samples one prompt group on a replica that serves `stamp`; tries another one if it dies, hangs or is not
        serving any more.

        With `affinity`, uses the replica that it remembers as long as that serves, and waits if it has no room. If none
        is remembered, uses any replica and remembers it.

        Raises:
            Unavailable: NO_REPLICA, no replica serves the current weights.
            InternalError: PROMPT_MISMATCH, the engine used other prompt tokens than those of `prompt`.
            DataLoss: The prompt or the group changed on the way.
        """
        wanted = pb.Prompt(prompt_id=prompt.prompt_id, tokens=prompt.tokens, seeds=seeds)
        # An evaluation, which asks for no routes either, has no blocks. Its answers would list thousands of prompts.
        reports = self._reports_unfinished and sampling.return_routes
        request = pb.GenerateRequest(
            expected_stamp=stamp, prompts=[wanted], sampling=sampling, report_unfinished=reports
        )
        cost = len(seeds) * (len(prompt.tokens) + sampling.max_tokens)
        while (found := await self._answers(request, cost, affinity or Affinity())) is None:
            self.lengths.pop(prompt.prompt_id, None)  # it begins again
        address, answers = found
        group = sampled_group(index, prompt, len(seeds), answers)
        require_kept(group, sampling, address)
        self._note_lengths({**answers[-1].unfinished, prompt.prompt_id: group.length})
        return group

    async def _answers(
        self, request: pb.GenerateRequest, cost: int, affinity: Affinity
    ) -> tuple[str, list[pb.GenerateResponse]] | None:
        """Returns the address of a replica and its answers; None if it was lost, or if none serves and one will."""
        try:
            reserved = self._reserved(len(request.prompts[0].seeds), cost, affinity)
            async with self._gpus.held_by(Side.ENGINES), reserved as replica:
                with self._dropping(replica):
                    return replica.address, [
                        require_sealed(request, answer) async for answer in replica.generate(request)
                    ]
            self.num_redispatched += 1
        except Unavailable as error:
            await self._recover(error)
        return None

    async def _recover(self, error: Unavailable) -> None:
        """Makes a replica serve again after all were lost: awaits a restart and repeats the publication.

        Raises:
            Unavailable: `error`; nothing is being restarted, or the trainer no longer has the weights.
        """
        async with self._recovering:  # only the first of the groups that wait does it
            if any(replica.state is ReplicaState.SERVING for replica in self.replicas):
                return
            if self.publish_again is None or not await self.await_restart():
                raise error
            await self.publish_again()

    async def await_restart(self) -> bool:
        """Returns whether a replica can take part in a publication. If none can, waits up to `timeouts.open_s` for one
        that the run itself is restarting.

        Raises:
            PreconditionFailed: RUN_REPLACED, as in `check`.
        """
        until = time.monotonic() + self._config.timeouts.open_s
        while not self.members and (opening := self._restarting()) and self._config.placement != "colocated":
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

    def _restarting(self) -> dict[str, asyncio.Task[None]]:
        """Returns the tasks that open the replicas that the run has started and lost, by address."""
        lost = {one.address for one in self.replicas if one.state is ReplicaState.DEAD}
        awaited = lost.intersection(self._started, self._reviving) - self._given_up
        return {address: self._reviving[address] for address in sorted(awaited) if not self._reviving[address].done()}

    def _note_lengths(self, lengths: Mapping[str, int]) -> None:
        for prompt_id, num_tokens in lengths.items():  # an answer may have been overtaken by that of another group
            self.lengths[prompt_id] = max(num_tokens, self.lengths.get(prompt_id, 0))

    @contextmanager
    def _dropping(self, replica: Replica) -> Iterator[None]:
        """Ends the block and marks the replica as dead if it dies, hangs or no longer serves."""
        try:
            yield
        except Unavailable as error:
            self.mark_dead(replica, error)
        except DeadlineExceeded as error:
            why = f"{error.message}: a group took longer than timeouts.generate_s, so its engine is replaced"
            self.mark_dead(replica, DeadlineExceeded(why), restart=True)
        except PreconditionFailed as error:
            if error.reason not in (Reason.NOT_SERVING, Reason.RUN_NOT_OPEN):
                raise
            self.mark_dead(replica, error)

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

    def check(self) -> None:
        """Raises RUN_REPLACED if another run has opened a replica that was to be reopened: this run must end."""
        if self._replaced:
            raise self._replaced

    async def drop_unreachable(self) -> int:
        """Checks every replica that is not DEAD. Returns how many did not answer."""
        living = [replica for replica in self.replicas if replica.state is not ReplicaState.DEAD]
        alive = await gather(replica.is_alive() for replica in living)
        lost = [replica for replica, is_alive in zip(living, alive, strict=True) if not is_alive]
        for replica in lost:
            self.mark_dead(replica, Unavailable("it does not answer"))
        return len(lost)

    async def close(self) -> None:
        """Closes the channels."""
        for task in self._reviving.values():
            task.cancel()
        await asyncio.gather(*self._reviving.values(), *self._closing.values(), return_exceptions=True)
        await gather(replica.close() for replica in self.replicas)

    async def _revive(self, replica: Replica, restart: bool) -> None:
        # Retries without limit, until the service listens again and opens the run.
        what = "is back" if replica.num_opens else "has come"
        if closing := self._closing.get(replica.address):  # it left a moment ago, and its run is still being closed
            await asyncio.wait({closing})
        for num_retries in itertools.count():
            try:
                if restart:
                    await replica.end_engine(self._run_id)
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
        """Does without replicas that are other names of services that the run uses; their run stays open."""
        for replica, used in same_services(self.replicas).items():
            why = f"the same service as {used.address}, which the run has already"
            self._refuse(replica, Note(why, is_unused=True, same_as=used.address))

    def _refuse(self, replica: Replica, note: Note) -> None:
        log.warning("replica %s is not used: %s", replica.address, note.why)
        self.notes.put(replica.address, note)
        self.replicas.remove(replica)
        self._closing[replica.address] = asyncio.create_task(replica.close())

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

    async def _close_run_on(self, replica: Replica, reviving: asyncio.Task[None] | None) -> None:
        if reviving:
            reviving.cancel()
            await asyncio.gather(reviving, return_exceptions=True)
        try:
            if replica.num_opens:
                await replica.leave(self._run_id)
        except LockstepError as error:  # its host may be gone
            log.info("run %s may still be open at %s: %s", self._run_id, replica.address, error.message)
        finally:
            await replica.close()
        log.info("replica %s has left the run", replica.address)

    @asynccontextmanager
    async def _reserved(self, num_samples: int, cost: int, affinity: Affinity) -> AsyncIterator[Replica]:
        async with self._changed:
            while (replica := self._pick(num_samples, affinity.replica)) is None:
                await self._changed.wait()
            affinity.replica = replica
            replica.samples_in_flight += num_samples
            replica.tokens_in_flight += cost
        try:
            with self.busy.working():
                yield replica
        finally:
            replica.samples_in_flight -= num_samples
            replica.tokens_in_flight -= cost
            self.drop_leavers()
            async with self._changed:
                self._changed.notify_all()

    def _pick(self, num_samples: int, preferred: Replica | None) -> Replica | None:
        self.check()
        serving = [replica for replica in self.replicas if replica.state is ReplicaState.SERVING]
        if not serving:
            raise self.no_replica("no rollout replica serves the current weights")
        serving = [replica for replica in serving if not replica.is_leaving] or serving
        if preferred in serving:
            serving = [preferred]
        with_room = [
            replica
            for replica in serving
            if replica.samples_in_flight == 0
            or replica.samples_in_flight + num_samples <= _IN_FLIGHT_FACTOR * replica.max_samples
        ]
        return min(with_room, key=lambda replica: replica.tokens_in_flight, default=None)
