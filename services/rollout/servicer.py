"""RolloutService: a replica serves only committed weights, and nothing during a publication."""

import asyncio
import contextlib
import hashlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Literal

from lockstep.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from lockstep.types.v1.types_pb2 import PolicyStamp
from prometheus_client import CollectorRegistry

from services.common.batches import tokens_sha256
from services.common.compat.torch import accelerator_libraries
from services.common.config.load import parse_json
from services.common.config.rollout import RolloutConfig
from services.common.errors import Aborted, InternalError, InvalidInput, PreconditionFailed, Reason
from services.common.routed_experts import routed_experts_shape, to_parts
from services.common.rpc.fence import Fence
from services.common.rpc.progress import PROGRESS
from services.common.rpc.server import NO_RUN, Context, OpenedRun, service_info, shielded
from services.common.rpc.transfer import seal
from services.common.weights.buckets import highest_cost
from services.common.weights.plan import require_stamp, show_stamp
from services.common.weights.trial import take_part
from services.rollout.arguments import Needs
from services.rollout.compat.worker import KV_CACHE, WEIGHTS
from services.rollout.engine import Engine, Sample
from services.rollout.metrics import RolloutMetrics, State, with_statistics
from services.rollout.receiver import WeightReceiver

log = logging.getLogger(__name__)

NAME = "lockstep.rollout.v1.RolloutService"

_PARTS: Mapping[int, str] = {rollout_pb2.ENGINE_PART_WEIGHTS: WEIGHTS, rollout_pb2.ENGINE_PART_KV_CACHE: KV_CACHE}


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """One engine and the stamp of its weights."""

    def __init__(self, fail: Callable[[str], None], registry: CollectorRegistry | None = None, *, counts: bool = False):
        """Creates the servicer without an engine. With `counts`, vLLM's own metrics are on, such as KV cache use."""
        self._fail, self._metrics, self._counts = fail, RolloutMetrics(registry, self._state), counts
        self._engine: Engine | None = None
        self._run, self._fence = NO_RUN, Fence(self._close_abandoned)
        self._needs = Needs()
        self._num_generating = 0
        self._max_samples = 0
        self._stamp: PolicyStamp | None = None
        self._received: PolicyStamp | None = None
        self._epoch = -1
        self._joined = False
        self._changing = asyncio.Lock()

    async def GetInfo(self, request: rollout_pb2.GetInfoRequest, context: Context) -> rollout_pb2.GetInfoResponse:
        self._fence.renew_lease()
        state = "serving" if self._stamp else "open" if self._engine else "idle"
        if self._engine and self._engine.asleep:
            state = "asleep"
        info = service_info("rollout", state, run=self._run, libraries=("torch", "transformers"))
        info.libraries.update(accelerator_libraries())
        return rollout_pb2.GetInfoResponse(
            info=info,
            stamp=self._stamp,
            samples_in_flight=self._engine.samples_in_flight if self._engine else 0,
            num_workers=self._engine.num_workers if self._engine else 0,
            max_samples=self._max_samples,
        )

    @shielded
    async def OpenRun(self, request: rollout_pb2.OpenRunRequest, context: Context) -> rollout_pb2.OpenRunResponse:
        config = parse_json(RolloutConfig, request.config_json)
        if self._counts:
            config = with_statistics(config)
        run = OpenedRun(request.run_id, hashlib.sha256(request.config_json.encode()).hexdigest())
        routed_experts = (
            routed_experts_shape(request.model_card.files["config.json"]) if request.return_routed_experts else None
        )
        needs = Needs(adapter_rank=request.adapter_rank, can_sleep=request.can_sleep, routed_experts=routed_experts)
        async with self._changing:
            self._fence.take_over(request.run_id)
            if self._engine and (self._run, self._needs) != (run, needs):
                await self._close()
            if self._engine is None:
                on_death = lambda: self._fail("the engine died")  # noqa: E731
                with PROGRESS.stage("start the engine"):
                    self._engine = await Engine.start(config, request.model_card, request.seed, on_death, needs)
                self._run, self._needs, self._max_samples = run, needs, config.max_samples
        return rollout_pb2.OpenRunResponse(
            num_workers=self._engine.num_workers,
            max_samples=self._max_samples,
            returns_routed_experts=self._engine.routed_experts is not None,
        )

    @shielded
    async def CloseRun(self, request: rollout_pb2.CloseRunRequest, context: Context) -> rollout_pb2.CloseRunResponse:
        async with self._changing:
            if request.run_id == self._run.run_id and self._fence.is_open:  # ignore a late close of a replaced run
                await self._close()
        return rollout_pb2.CloseRunResponse()

    @contextlib.contextmanager
    def _generating(
        self,
        tasks: Sequence[Sequence[asyncio.Task[Sample]]],
        answers: Sequence[asyncio.Task[list[rollout_pb2.GenerateResponse]]],
    ) -> Iterator[None]:
        """Counts a call of Generate. Aborts samples left at its end, because the caller is gone or a group failed."""
        self._num_generating += 1
        try:
            yield
        finally:
            self._num_generating -= 1
            for task in itertools.chain(*tasks):
                task.cancel()
            # Takes the errors of the other groups, each of which asyncio would log as one that nobody has seen.
            asyncio.gather(*answers, return_exceptions=True)

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        engine, stamp = self._open_engine(), self._served(request.expected_stamp)

        async def answer(
            prompt: rollout_pb2.Prompt, tasks: list[asyncio.Task[Sample]]
        ) -> list[rollout_pb2.GenerateResponse]:
            samples = await asyncio.gather(*tasks)
            # Answer with the current stamp, not with the requested one, because the caller compares the two.
            if self._stamp is None or self._stamp != stamp:
                raise PreconditionFailed("the weights changed while sampling", reason=Reason.NOT_SERVING)
            self._metrics.tokens.inc(sum(len(sample.completion.tokens) for sample in samples))
            group = _group(prompt.prompt_id, samples, self._stamp)
            if request.report_unfinished:
                group.unfinished.update(engine.unfinished())
            return [
                seal(request, message)
                for message in (
                    *_split_recorded("routed_experts", group, samples),
                    *_split_recorded("sampling_mask", group, samples),
                    group,
                )
            ]

        tasks = [
            [
                asyncio.create_task(engine.sample(prompt.tokens, seed, request.sampling, prompt.prompt_id))
                for seed in prompt.seeds
            ]
            for prompt in request.prompts
        ]
        answers = [asyncio.create_task(coroutine) for coroutine in map(answer, request.prompts, tasks)]
        with self._generating(tasks, answers), self._fence.guarding():  # another run would close the engine
            # As they finish, so that groups are scored and trained on while others are still sampled.
            for finished in asyncio.as_completed(answers):
                for message in await finished:
                    yield message

    async def JoinWeightGroup(
        self, request: rollout_pb2.JoinWeightGroupRequest, context: Context
    ) -> rollout_pb2.JoinWeightGroupResponse:
        epoch = request.group.epoch
        self._open_engine()
        if epoch <= self._epoch:
            raise PreconditionFailed(
                f"epoch {epoch} is not above {self._epoch}, which this replica has seen", reason=Reason.OLD_EPOCH
            )
        if bool(request.plan.adapter_config_json) != bool(self._needs.adapter_rank):
            raise InvalidInput(
                f"plan: the engine was opened with adapter_rank {self._needs.adapter_rank}, the plan has "
                f"{'an' if request.plan.adapter_config_json else 'no'} adapter; open both with the same config",
                field="plan",
            )
        if request.base_rank < (least := request.plan.num_senders):
            raise InvalidInput(f"base_rank: must be {least} or more, after the plan's senders", field="base_rank")
        async with self._changing:
            engine = self._open_engine()  # another run may have been opened while this waited for the lock
            # Before the attempt: an epoch in which a member has failed must not be joined again.
            self._epoch, self._joined = epoch, False
            group, plan = request.group.SerializeToString(), request.plan.SerializeToString()
            with PROGRESS.stage("connect to the trainer"):
                answers = await engine.call_workers(WeightReceiver.lockstep_join, group, plan, request.base_rank)
            self._raise_errors(answers)
            self._joined = True
        return rollout_pb2.JoinWeightGroupResponse(plan_digest=answers[0]["plan_digest"])

    async def ReceiveWeights(
        self, request: rollout_pb2.ReceiveWeightsRequest, context: Context
    ) -> rollout_pb2.ReceiveWeightsResponse:
        async with self._changing:
            engine = self._open_engine()
            if not self._joined or request.epoch != self._epoch:
                raise PreconditionFailed(f"epoch {request.epoch} was not joined", reason=Reason.NOT_JOINED)
            if WEIGHTS in engine.asleep:
                raise PreconditionFailed("the engine has no memory for weights; call Wake", reason=Reason.ASLEEP)
            # The first bucket overwrites served weights, so nothing may be sampled from here on.
            self._stamp = self._received = None
            await engine.pause()
            answers = await engine.call_workers(WeightReceiver.lockstep_receive, request.version)
            ends = [answer for answer in answers if "error" not in answer]
            # A worker that failed has left its group (receiver.py), so this epoch cannot be used again.
            self._joined = len(ends) == len(answers)
            self._raise_errors(answers)
            digests = {end["digest"] for end in ends}
            if len(digests) != 1:
                raise PreconditionFailed(f"workers have different weights: {digests}", reason=Reason.DIGEST_MISMATCH)
            self._received = PolicyStamp(version=request.version, digest=digests.pop())
        received = rollout_pb2.ReceiveWeightsResponse(
            digest=self._received.digest,
            num_bytes=ends[0]["num_bytes"],
            duration_s=max(end["duration_s"] for end in ends),
            wait_s=max(end["wait_s"] for end in ends),
            cost=highest_cost([end["cost"] for end in ends]),
            quantized_digest=_joined_digest([end["quantized_digest"] for end in ends]),
        )
        self._metrics.published_bytes.inc(received.num_bytes)
        self._metrics.publication_seconds.observe(received.duration_s)
        return received

    async def CommitWeights(
        self, request: rollout_pb2.CommitWeightsRequest, context: Context
    ) -> rollout_pb2.CommitWeightsResponse:
        async with self._changing:
            engine = self._open_engine()
            if self._stamp is not None and self._stamp == request.stamp:
                return rollout_pb2.CommitWeightsResponse()
            if self._received is None or self._received != request.stamp:
                received = show_stamp(self._received) if self._received else "nothing"
                raise PreconditionFailed(
                    f"asked to serve {show_stamp(request.stamp)} but received {received}", reason=Reason.DIGEST_MISMATCH
                )
            if engine.asleep:
                raise PreconditionFailed("the engine has no KV cache; call Wake", reason=Reason.ASLEEP)
            await engine.resume()
            self._stamp, self._received = self._received, None
        return rollout_pb2.CommitWeightsResponse()

    @shielded
    async def Sleep(self, request: rollout_pb2.SleepRequest, context: Context) -> rollout_pb2.SleepResponse:
        async with self._changing:
            if request.run_id:
                if request.run_id != self._run.run_id:
                    return rollout_pb2.SleepResponse()
                self._fence.take_over(request.run_id)
                if self._engine and not self._needs.can_sleep:  # of a session with another placement
                    await self._close()
                    return rollout_pb2.SleepResponse()
            engine = self._open_engine()
            if not self._needs.can_sleep:
                raise PreconditionFailed("the run was opened without can_sleep, so its engine cannot free its memory")
            if self._num_generating:
                raise PreconditionFailed(
                    f"{self._num_generating} calls of Generate are in progress; wait for them, or cancel them"
                )
            self._stamp = self._received = None  # the weights are dropped: others must be received and committed
            return rollout_pb2.SleepResponse(workers=await engine.sleep())

    @shielded
    async def Wake(self, request: rollout_pb2.WakeRequest, context: Context) -> rollout_pb2.WakeResponse:
        part = _PARTS.get(request.part)
        if part is None:
            raise InvalidInput("part: must be weights or kv_cache", field="part")
        async with self._changing:
            engine = self._open_engine()
            if part == KV_CACHE and WEIGHTS in engine.asleep:
                raise PreconditionFailed("the weights must be woken before the KV cache", reason=Reason.ASLEEP)
            return rollout_pb2.WakeResponse(workers=await engine.wake(part))

    async def ReceiveTestBroadcast(
        self, request: rollout_pb2.ReceiveTestBroadcastRequest, context: Context
    ) -> rollout_pb2.ReceiveTestBroadcastResponse:
        async with self._changing:
            if self._engine is not None:
                raise PreconditionFailed(
                    f"run {self._run.run_id} is open on this replica and a test broadcast would disturb it; "
                    "end it first"
                )
            return rollout_pb2.ReceiveTestBroadcastResponse(outcome=await take_part(request.group, request.rank))

    async def close(self) -> None:
        async with self._changing:
            await self._close()

    async def _close_abandoned(self) -> None:
        async with self._changing:
            if self._fence.lease.has_ended(self._run.run_id):
                await self._close()

    async def _close(self) -> None:
        engine, self._engine = self._engine, None
        self._stamp = self._received = None
        self._joined, self._epoch, self._run = False, -1, NO_RUN
        if engine:
            await engine.close()

    def _state(self) -> State:
        engine = self._engine
        return State(engine.samples_in_flight if engine else 0, self._max_samples, self._stamp)

    def _open_engine(self) -> Engine:
        self._fence.require()
        if self._engine is None:
            raise PreconditionFailed("no run is open on this replica; call OpenRun", reason=Reason.RUN_NOT_OPEN)
        return self._engine

    def _served(self, expected: PolicyStamp) -> PolicyStamp:
        if self._engine and self._engine.asleep:
            raise PreconditionFailed("the engine sleeps, and its weights were dropped", reason=Reason.ASLEEP)
        if self._stamp is None:
            raise PreconditionFailed("this replica serves no committed weights", reason=Reason.NOT_SERVING)
        require_stamp(expected, self._stamp, who="this replica")
        return self._stamp

    def _raise_errors(self, answers: Sequence[Mapping[str, object]]) -> None:
        errors = [f"worker {index}: {answer['error']}" for index, answer in enumerate(answers) if "error" in answer]
        if errors:
            absent = next((answer["absent"] for answer in answers if answer.get("absent")), "")
            raise Aborted("; ".join(errors), epoch=self._epoch, absent=absent)


def _joined_digest(digests: Sequence[str]) -> str:
    """Returns one hash for those of all workers, each of which has its part of the weights; "" if none has any."""
    return hashlib.blake2b("\n".join(digests).encode(), digest_size=16).hexdigest() if any(digests) else ""


def _group(prompt_id: str, samples: Sequence[Sample], stamp: PolicyStamp) -> rollout_pb2.GenerateResponse:
    seen = samples[0].prompt_tokens if samples else ()
    if any(sample.prompt_tokens != seen for sample in samples):
        raise InternalError(f"the engine used several prompts for the samples of prompt {prompt_id}")
    names = rollout_pb2.Drafts.DESCRIPTOR.fields_by_name
    drafts = {name: sum(getattr(sample.drafts, name) for sample in samples) for name in names}
    return rollout_pb2.GenerateResponse(
        prompt_id=prompt_id,
        completions=[sample.completion for sample in samples],
        stamp=stamp,
        prompt_num_tokens=len(seen),
        prompt_sha256=tokens_sha256(seen),
        num_cached_tokens=sum(sample.num_cached_tokens for sample in samples),
        drafts=rollout_pb2.Drafts(**drafts) if any(drafts.values()) else None,
    )


def _split_recorded(
    name: Literal["routed_experts", "sampling_mask"], group: rollout_pb2.GenerateResponse, samples: Sequence[Sample]
) -> Iterator[rollout_pb2.GenerateResponse]:
    """Yields the messages with the group's routed experts or sampling masks, which come before the group; none if it
    has none."""
    values: list[bytes] = [getattr(sample, name) for sample in samples]
    for part in to_parts(values) if any(values) else ():
        message = rollout_pb2.GenerateResponse(prompt_id=group.prompt_id, stamp=group.stamp)
        getattr(message, name).append(part)
        yield message
