"""Implements the gRPC service lockstep.reward.v1.RewardService."""

import asyncio
import hashlib
import logging
import re

from lockstep.reward.v1 import reward_pb2 as pb
from lockstep.reward.v1 import reward_pb2_grpc

from services.common.config.environment import EnvironmentSection
from services.common.config.load import parse_json
from services.common.config.reward import RewardConfig
from services.common.errors import InvalidInput
from services.common.rpc.fence import Fence
from services.common.rpc.progress import PROGRESS
from services.common.rpc.server import NO_RUN, Context, OpenedRun, service_info, shielded
from services.common.rpc.transfer import seal
from services.common.telemetry import within
from services.reward.agents.runners import Place
from services.reward.agents.servicer import AgentServicer
from services.reward.environments.servicer import EnvironmentServicer, finish_reason, parse_object, require_run
from services.reward.errors import Tracebacks
from services.reward.metrics import RewardMetrics
from services.reward.scorers.base import Item
from services.reward.scoring import Outcome, ScoringRun

log = logging.getLogger(__name__)

NAME = "lockstep.reward.v1.RewardService"


class RewardServicer(reward_pb2_grpc.RewardServiceServicer):
    """Serves one open run at a time. `Score` changes no state, so it can be retried and spread over replicas."""

    def __init__(self, metrics: RewardMetrics | None = None, place: Place | None = None) -> None:
        """`place` says where agents on other hosts reach the service; by default nowhere."""
        self._metrics = metrics or RewardMetrics()
        self._fence = Fence(self._close_abandoned)
        self.environments = EnvironmentServicer(self._metrics, self._fence)
        self.agents = AgentServicer(self._metrics, self._fence, place)
        self._run: ScoringRun | None = None
        self._answer, self._answer_column = pb.OpenRunResponse(), ""
        self._opened = NO_RUN
        self._changing = asyncio.Lock()
        self._tracebacks = Tracebacks()

    async def GetInfo(self, request: pb.GetInfoRequest, context: Context) -> pb.GetInfoResponse:
        self._fence.renew_lease()
        state, libraries = "open" if self._run else "idle", ("math-verify", "sympy")
        info = service_info("reward", state, run=self._opened, libraries=libraries)
        return pb.GetInfoResponse(info=info)

    async def OpenRun(self, request: pb.OpenRunRequest, context: Context) -> pb.OpenRunResponse:
        """Starts the scorers, and the environment if the run has one.

        Repeating the call changes nothing; a call with another run or config closes what is open first. If another
        coordinator goes on with the run, the episodes of the one before end: their ids are known to nobody else.

        Raises:
            InvalidInput: The config is invalid, or a scorer or the environment cannot start.
        """
        if not request.run_id:
            raise InvalidInput("run_id: must not be empty", field="run_id")
        config = parse_json(RewardConfig, request.config_json)
        environment = None
        if request.environment_json:
            environment = parse_json(EnvironmentSection, request.environment_json, field="environment_json").root
        sections = request.config_json + request.environment_json + request.answer_column
        opened = OpenedRun(request.run_id, hashlib.sha256(sections.encode()).hexdigest())
        async with self._changing:
            replaces = not self._fence.is_open
            self._fence.take_over(request.run_id)
            if replaces:
                self.environments.end_episodes()
                self.agents.end_episodes()
            if self._run is None or opened != self._opened:
                await self._close()
                run = ScoringRun(config, self._metrics)
                try:
                    with PROGRESS.stage("start the scorers"):
                        await run.open()
                    if environment and environment.kind == "agent":
                        self._answer = await self.agents.open(request.run_id, environment)
                    else:
                        self._answer = await self.environments.open(request.run_id, environment)
                except BaseException:  # cancellation too: no process may be left running
                    await run.close()
                    raise
                self._answer.scorer, self._answer.reads_tokens = run.scorer, run.reads_tokens
                self._run, self._opened, self._answer_column = run, opened, request.answer_column
                log.info("run %s opened: %s %s", request.run_id, run.scorer, self._answer.environment)
            return self._answer

    @shielded
    async def CloseRun(self, request: pb.CloseRunRequest, context: Context) -> pb.CloseRunResponse:
        """Does nothing if the run is not the open one."""
        async with self._changing:
            if request.run_id == self._opened.run_id and self._fence.is_open:
                await self._close()
        return pb.CloseRunResponse()

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        """Scores the samples of one prompt group concurrently. Canceling the call kills the workers that work on it.

        Raises:
            PreconditionFailed: See `require_run`.
            InvalidInput: There is no candidate, or a field cannot be parsed.
        """
        require_run(self._fence, request.run_id, self._opened.run_id)
        assert self._run, "a run is open"
        scorer = self._run.scorer
        items = _items(request, self._answer_column)
        self._metrics.queue.inc(len(items))
        try:
            with self._fence.guarding():  # another run would close the scorers
                outcomes = await self._run.score(items)
        finally:
            self._metrics.queue.dec(len(items))
        for sample, outcome in enumerate(outcomes):
            if failure := outcome.failure:
                text = f"scorer {outcome.failed_scorer}: {failure}{self._tracebacks.once(failure.traceback)}"
                with within(group=request.prompt_id, sample=sample):
                    log.warning("prompt %s sample %d: %s", request.prompt_id, sample, text)
        return seal(request, pb.ScoreResponse(scores=map(_to_message, outcomes), scorer=scorer))

    async def close(self) -> None:
        async with self._changing:
            await self._close()

    async def _close_abandoned(self) -> None:
        async with self._changing:
            if self._fence.lease.has_ended(self._opened.run_id):
                await self._close()

    async def _close(self) -> None:
        self._tracebacks = Tracebacks()
        run, self._run, self._opened = self._run, None, NO_RUN
        await self.environments.end()
        await self.agents.end()
        if run:
            await run.close()


def _items(request: pb.ScoreRequest, answer_column: str) -> list[Item]:
    if not request.candidates:
        raise InvalidInput("candidates: a prompt group has at least one sample", field="candidates")
    if request.answer_is_integer and not re.fullmatch("-?[0-9]+", request.answer):
        raise InvalidInput(f"answer: with answer_is_integer, it is no integer: {request.answer!r:.80}", field="answer")
    extra = parse_object(request.extra_json, field="extra_json")
    messages = [{"role": message.role, "content": message.content} for message in request.messages]
    return [
        Item(
            prompt=request.prompt,
            answer=request.answer,
            answer_is_integer=request.answer_is_integer,
            extra=extra | _left_behind(candidate),
            completion=candidate.text,
            num_tokens=candidate.num_tokens,
            finish_reason=finish_reason(candidate.finish_reason, field=f"candidates[{index}].finish_reason"),
            messages=messages,
            tokens=list(candidate.tokens),
            answer_column=answer_column,
        )
        for index, candidate in enumerate(request.candidates)
    ]


def _left_behind(candidate: pb.Candidate) -> dict[str, object]:
    """Returns the entry `agent` of a sample's extra columns: what the agent left behind; none without an agent."""
    if not candidate.HasField("agent"):
        return {}
    files = {path: content.decode(errors="replace") for path, content in candidate.agent.files.items()}
    return {"agent": {"exit_code": candidate.agent.exit_code, "files": files}}


def _to_message(outcome: Outcome) -> pb.Score:
    score = pb.Score(reward=outcome.reward, components=outcome.components)
    if failure := outcome.failure:
        reason = f"FAILURE_REASON_{failure.reason}"
        score.failure.CopyFrom(pb.Failure(reason=reason, scorer=outcome.failed_scorer, message=failure.detail))
    return score
