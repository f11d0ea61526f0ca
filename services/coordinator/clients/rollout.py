"""Samples prompt groups on the replicas of a run: dispatches by load, and again what a lost replica had."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass

from lockstep.rollout.v1 import rollout_pb2 as pb
from lockstep.types.v1.types_pb2 import PolicyStamp, SamplingParams

from services.common.batches import tokens_sha256
from services.common.config.run import Config
from services.common.config.streaming import orders_by_length
from services.common.errors import DeadlineExceeded, InternalError, PreconditionFailed, Reason, Unavailable
from services.common.routed_experts import from_parts
from services.common.rpc.tls import LOCAL, Transport
from services.common.rpc.transfer import require_sealed
from services.coordinator.clients.gpus import OwnGpus, Side
from services.coordinator.clients.replica import Replica, ReplicaState
from services.coordinator.clients.replicas import ReplicaSet
from services.coordinator.data.groups import SampledGroup
from services.coordinator.data.prompts import Prompt
from services.coordinator.runs.clock import Busy

log = logging.getLogger(__name__)

# Number of samples sent to a replica, as a multiple of those its engine runs at once, so that the slots of finished
# samples are refilled at once instead of waiting for the slowest sample of a group.
_IN_FLIGHT_FACTOR = 2


@dataclass
class Affinity:
    """Remembers the replica of an episode, which has the earlier turns in its prefix cache."""

    replica: Replica | None = None


class Rollout(ReplicaSet):
    """Dispatches each group to the serving replica with the fewest tokens in flight, or to its affinity's."""

    def __init__(
        self,
        addresses: Sequence[str],
        config: Config,
        transport: Transport = LOCAL,
        gpus: OwnGpus | None = None,
        started: Collection[str] = (),
    ):
        """Generating holds `gpus` for the engines. See `ReplicaSet` for `started`."""
        super().__init__(addresses, config, transport, gpus, started)
        self.num_redispatched, self.busy = 0, Busy()
        self.lengths: dict[str, int] = {}
        """A lower bound of the tokens of each group's longest sample, by prompt id, if blocks need it."""
        self.before_publication: Callable[[], Awaitable[None]] | None = None
        """Reads the list of replicas that the run should have."""
        self.publish_again: Callable[[], Awaitable[object]] | None = None
        """Publishes the weights that groups are sampled from once more, if the trainer still has them."""
        self._recovering = asyncio.Lock()
        self._reports_unfinished = orders_by_length(config)
        self._changed = asyncio.Condition()

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
        # An evaluation, which asks for no routed experts either, has no blocks. Its answers would list thousands of
        # prompts.
        reports = self._reports_unfinished and sampling.return_routed_experts
        request = pb.GenerateRequest(
            expected_stamp=stamp, prompts=[wanted], sampling=sampling, report_unfinished=reports
        )
        # An upper bound, because nobody knows yet how long the samples will be.
        cost = len(seeds) * (len(prompt.tokens) + sampling.max_tokens)
        kept = set[Replica]()
        while (answered := await self._answers(request, cost, affinity or Affinity(), kept)) is None:
            self.lengths.pop(prompt.prompt_id, None)  # it begins again
        address, answers = answered
        group = _group_of(index, prompt, len(seeds), answers)
        if sampling.return_sampling_mask and not group.sampling_mask:
            raise InternalError(f"replica {address} returned no sampling masks; update its service")
        lengths = {**answers[-1].unfinished, prompt.prompt_id: group.length}
        for prompt_id, num_tokens in lengths.items():  # an answer may have been overtaken by that of another group
            self.lengths[prompt_id] = max(num_tokens, self.lengths.get(prompt_id, 0))
        return group

    async def _answers(
        self, request: pb.GenerateRequest, cost: int, affinity: Affinity, kept: set[Replica]
    ) -> tuple[str, list[pb.GenerateResponse]] | None:
        """Returns the address of a replica and its answers; None if it was lost, or if none serves and one will.

        A replica that has only lost the connection goes on, and is added to `kept`; it is lost if it is there already.
        """
        try:
            reserved = self._reserved(len(request.prompts[0].seeds), cost, affinity)
            async with self._gpus.held_by(Side.ENGINES), reserved as replica:
                answers = await self._answers_of(replica, request, kept)
            if answers is not None:
                return replica.address, answers
            self.num_redispatched += 1
        except Unavailable as error:
            await self._recover(error)
        return None

    async def _answers_of(
        self, replica: Replica, request: pb.GenerateRequest, kept: set[Replica]
    ) -> list[pb.GenerateResponse] | None:
        """Returns the answers of a replica; None if it was lost, or serves the weights and only lost the connection."""
        with self._dropping(replica):
            try:
                async with aclosing(replica.generate(request)) as groups:
                    return [require_sealed(request, group) async for group in groups]
            except Unavailable as error:
                if replica in kept or not await replica.serves(request.expected_stamp):
                    raise
                kept.add(replica)
                log.info("lost the connection to replica %s, which still serves: %s", replica.address, error.message)
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
            # A group larger than the limit has room on an idle replica.
            if not replica.samples_in_flight
            or replica.samples_in_flight + num_samples <= _IN_FLIGHT_FACTOR * replica.max_samples
        ]
        return min(with_room, key=lambda replica: replica.tokens_in_flight, default=None)


def _group_of(index: int, prompt: Prompt, num_samples: int, answers: Sequence[pb.GenerateResponse]) -> SampledGroup:
    """Returns the group in the answers of one replica.

    Raises:
        InternalError: The group is incomplete; PROMPT_MISMATCH, the engine used other prompt tokens.
    """
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
        routed_experts=from_parts((part for message in answers for part in message.routed_experts), num_samples),
        sampling_mask=from_parts((part for message in answers for part in message.sampling_mask), num_samples),
    )
