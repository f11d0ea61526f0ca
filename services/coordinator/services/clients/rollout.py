"""Several rollout replicas as one: load-aware dispatch, re-dispatch of what a dead one left, return of the revived."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from lockstep.types.v1.types_pb2 import ModelCard, PolicyStamp, SamplingParams

from services.common.config.run import Config
from services.common.errors import (
    DeadlineExceeded,
    InvalidInput,
    LockstepError,
    PermissionDenied,
    PreconditionFailed,
    Reason,
    Unauthenticated,
    Unavailable,
)
from services.common.rpc.tls import LOCAL, Transport
from services.common.tasks import backoff_s, gather
from services.coordinator.data.groups import SampledGroup
from services.coordinator.data.prompts import Prompt
from services.coordinator.services.clients.replica import Replica, ReplicaState

log = logging.getLogger(__name__)

# Samples at a replica over those that its engine runs at once: a group's slots do not wait for its slowest sample.
_IN_FLIGHT = 2
# A later try would end like the first.
_PERMANENT = (InvalidInput, PermissionDenied, Unauthenticated)


class Rollout:
    """All replicas. A group goes to the serving replica with the fewest tokens in flight."""

    def __init__(self, addresses: Sequence[str], config: Config, transport: Transport = LOCAL):
        self.replicas = [Replica(address, config.timeouts, transport) for address in addresses]
        self.num_redispatched = 0
        self._config = config
        self._changed = asyncio.Condition()
        self._reviving: dict[str, asyncio.Task[None]] = {}
        self._last_loss = "nothing was published yet"
        self._run_id, self._card = "", ModelCard()

    @property
    def num_dead(self) -> int:
        """Replicas that are gone and have not come back."""
        return sum(replica.state is ReplicaState.DEAD for replica in self.replicas)

    async def open(self, run_id: str, card: ModelCard) -> None:
        """Starts the engines of all replicas."""
        self._run_id, self._card = run_id, card
        await gather(replica.open(run_id, self._config, card) for replica in self.replicas)

    async def generate(
        self, index: int, prompt: Prompt, seeds: Sequence[int], sampling: SamplingParams, stamp: PolicyStamp
    ) -> SampledGroup:
        """One prompt group from any replica that serves `stamp`; if that one dies, hangs or loses it, from another.

        Raises:
            Unavailable: NO_REPLICA if none is left that serves.
        """
        cost = len(seeds) * (len(prompt.tokens) + sampling.max_tokens)
        while True:
            async with self._least_loaded(len(seeds), cost) as replica:
                try:
                    return await replica.generate(index, prompt, seeds, sampling, stamp)
                except (Unavailable, DeadlineExceeded) as error:
                    self.mark_dead(replica, error)
                except PreconditionFailed as error:
                    if error.reason not in (Reason.NOT_SERVING, Reason.RUN_NOT_OPEN):
                        raise
                    self.mark_dead(replica, error)
            self.num_redispatched += 1

    def mark_dead(self, replica: Replica, why: LockstepError) -> None:
        """Gives the replica no more groups, and opens it again as soon as it is back."""
        if replica.state is ReplicaState.DEAD:
            return
        self._last_loss = f"replica {replica.address} is out: {why.message}"
        log.warning("%s", self._last_loss)
        replica.state = ReplicaState.DEAD
        self._reviving[replica.address] = asyncio.create_task(self._revive(replica))

    async def drop_unreachable(self) -> int:
        """Asks every living replica whether it is there; returns how many were not."""
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
        await asyncio.gather(*self._reviving.values(), return_exceptions=True)
        await gather(replica.close() for replica in self.replicas)

    async def _revive(self, replica: Replica) -> None:
        # Until the service listens again and opens the run, however long that takes.
        for num_retries in itertools.count():
            try:
                await replica.open(self._run_id, self._config, self._card)
                break
            except _PERMANENT as error:
                log.error("replica %s stays out: %s", replica.address, error.message)
                return
            except LockstepError as error:
                log.warning("replica %s is not back yet: %s", replica.address, error.message)
            await asyncio.sleep(backoff_s(num_retries))
        log.info("replica %s is back and waits for the next publication", replica.address)

    @asynccontextmanager
    async def _least_loaded(self, num_samples: int, cost: int) -> AsyncIterator[Replica]:
        async with self._changed:
            while (replica := self._pick(num_samples)) is None:
                await self._changed.wait()
            replica.samples_in_flight += num_samples
            replica.tokens_in_flight += cost
        try:
            yield replica
        finally:
            replica.samples_in_flight -= num_samples
            replica.tokens_in_flight -= cost
            async with self._changed:
                self._changed.notify_all()

    def _pick(self, num_samples: int) -> Replica | None:
        serving = [replica for replica in self.replicas if replica.state is ReplicaState.SERVING]
        if not serving:
            why = f"no rollout replica serves the current weights; {self._last_loss}"
            raise Unavailable(why, reason=Reason.NO_REPLICA)
        with_room = [
            replica
            for replica in serving
            if replica.samples_in_flight == 0
            or replica.samples_in_flight + num_samples <= _IN_FLIGHT * replica.max_samples
        ]
        return min(with_room, key=lambda replica: replica.tokens_in_flight, default=None)
