"""Calls all rollout replicas: dispatches by load, re-dispatches groups of dead replicas and revives replicas."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager

from lockstep.rollout.v1 import rollout_pb2 as pb
from lockstep.types.v1.types_pb2 import ModelCard, PolicyStamp, SamplingParams

from services.common.batches.route_parts import from_parts
from services.common.batches.token_hash import tokens_sha256
from services.common.config.run import Config
from services.common.config.streaming import orders_by_length
from services.common.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    LockstepError,
    PermissionDenied,
    PreconditionFailed,
    Reason,
    Unauthenticated,
    Unavailable,
)
from services.common.files.transfer import require_sealed
from services.common.rpc.security.tls import LOCAL, Transport
from services.common.tasks import backoff_s, gather
from services.coordinator.data.groups import SampledGroup
from services.coordinator.data.prompts import Prompt
from services.coordinator.runs.lanes import Busy
from services.coordinator.services.clients.replica import Replica, ReplicaState
from services.coordinator.services.gpus import OwnGpus, Side

log = logging.getLogger(__name__)

# Number of samples sent to a replica, as a multiple of those its engine runs at once, so that the slots of finished
# samples are refilled at once instead of waiting for the slowest sample of a group.
_IN_FLIGHT_FACTOR = 2
# Errors that a retry cannot fix.
_PERMANENT_ERRORS = (InvalidInput, PermissionDenied, Unauthenticated)


class Affinity:
    """Remembers the replica of an episode, which has the earlier turns in its prefix cache."""

    def __init__(self):
        self.replica: Replica | None = None


class Rollout:
    """Dispatches each group to the serving replica with the fewest tokens in flight, or to its affinity's."""

    def __init__(
        self, addresses: Sequence[str], config: Config, transport: Transport = LOCAL, gpus: OwnGpus | None = None
    ):
        """Creates clients of the replicas. Generating holds `gpus` for the engines."""
        self._gpus = gpus or OwnGpus()
        self.replicas = [Replica(address, config.timeouts, transport) for address in addresses]
        self.num_redispatched, self.busy = 0, Busy()
        self.lengths: dict[str, int] = {}
        """A lower bound of the tokens of each group's longest sample, by prompt id, if blocks need it."""
        self.before_publication: Callable[[], Awaitable[None]] | None = None
        """Reads the list of replicas that the run should have."""
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
        living = [replica for replica in self.replicas if replica.state is not ReplicaState.DEAD]
        return [replica for replica in living if not replica.is_leaving] or living

    async def open(self, run_id: str, card: ModelCard) -> None:
        """Starts the engines of all replicas.

        Raises:
            LockstepError: The first failure. If a replica refuses its config, the message names the replica.
        """
        self._run_id, self._card = run_id, card
        await gather(self._open(replica) for replica in self.replicas)

    async def _open(self, replica: Replica) -> None:
        try:
            await replica.open(self._run_id, self._config, self._card)
        except InvalidInput as error:
            message = f"replica {replica.address}: {error.message}"
            raise InvalidInput(message, reason=error.reason, **error.metadata) from error

    def set_replicas(self, addresses: Sequence[str]) -> None:
        """Makes the run's replicas those at `addresses`.

        A new one is opened in the background and takes part in publications from then on. One that is not in
        `addresses` gets no new groups while another one serves, and is dropped once its last group is finished.

        Raises:
            InvalidInput: An address is malformed, or the connection would be plaintext over a network.
        """
        known = {replica.address: replica for replica in self.replicas}
        new = [Replica(at, self._config.timeouts, self._transport) for at in addresses if at not in known]
        for address, replica in known.items():
            leaves = address not in addresses
            if replica.is_leaving != leaves:
                log.info("replica %s %s", address, "leaves the run" if leaves else "stays after all")
            replica.is_leaving = leaves
        for replica in new:
            log.info("replica %s is opened, and joins the run with the next publication after that", replica.address)
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
        while True:
            reserved = self._reserved(len(seeds), cost, affinity or Affinity())
            async with self._gpus.held_by(Side.ENGINES), reserved as replica:
                with self._dropping(replica):
                    answers = [require_sealed(request, answer) async for answer in replica.generate(request)]
                    group = _group(index, prompt, len(seeds), answers)
                    _require_kept(group, sampling, replica.address)
                    self._note_lengths({**answers[-1].unfinished, prompt.prompt_id: group.length})
                    return group
            self.lengths.pop(prompt.prompt_id, None)  # it begins again
            self.num_redispatched += 1

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
        replica.state = ReplicaState.DEAD
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
                async with self._gpus.opening_engine():
                    await replica.open(self._run_id, self._config, self._card)
                break
            except LockstepError as error:
                if error.reason is Reason.RUN_REPLACED and replica.num_opens:
                    self._replaced = error
                if self._replaced or isinstance(error, _PERMANENT_ERRORS):
                    log.error("cannot reopen replica %s: %s", replica.address, error.message)
                    return
                log.warning("replica %s is not back yet: %s", replica.address, error.message)
            await asyncio.sleep(backoff_s(num_retries))
        log.info("replica %s %s and waits for the next publication of weights", replica.address, what)

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
            why = f"no rollout replica serves the current weights; {self._last_failure}"
            raise Unavailable(why, reason=Reason.NO_REPLICA)
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


def _require_kept(group: SampledGroup, sampling: SamplingParams, address: str) -> None:
    if sampling.return_kept and not group.kept:
        raise InternalError(f"replica {address} returned no kept sets; update its service")


def _group(index: int, prompt: Prompt, num_samples: int, answers: Sequence[pb.GenerateResponse]) -> SampledGroup:
    if not answers or len(answers[-1].completions) != num_samples or any(part.completions for part in answers[:-1]):
        raise InternalError(f"a replica returned an incomplete group for prompt {prompt.prompt_id}")
    answer = answers[-1]
    sent, seen = tokens_sha256(prompt.tokens), answer.prompt_sha256
    if (answer.prompt_num_tokens, seen) != (len(prompt.tokens), sent):
        raise InternalError(
            f"prompt {prompt.prompt_id} was sent as {len(prompt.tokens)} tokens (SHA-256 {sent[:8]}), but the engine "
            f"used {answer.prompt_num_tokens} tokens ({seen[:8] or 'no SHA-256'})",
            reason=Reason.PROMPT_MISMATCH,
        )
    return SampledGroup(
        index,
        prompt,
        answer.completions,
        answer.stamp,
        drafts=answer.drafts,
        num_cached_tokens=answer.num_cached_tokens,
        routes=from_parts((part for message in answers for part in message.routes), num_samples),
        kept=from_parts((part for message in answers for part in message.kept), num_samples),
    )
