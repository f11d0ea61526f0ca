"""Implements the gRPC service lockstep.reward.v1.RewardService."""

import asyncio
import hashlib
import json
import logging

from lockstep.reward.v1 import reward_pb2 as pb
from lockstep.reward.v1 import reward_pb2_grpc
from lockstep.types.v1 import types_pb2

from services.common.config.load import parse_json
from services.common.config.reward.section import RewardConfig
from services.common.errors import InvalidInput, PreconditionFailed, Reason
from services.common.rpc.server import NO_RUN, Context, OpenedRun, service_info, shielded
from services.common.telemetry.context import within
from services.reward.metrics import RewardMetrics
from services.reward.run import Outcome, ScoringRun
from services.reward.scorers.base import Item

log = logging.getLogger(__name__)

NAME = "lockstep.reward.v1.RewardService"
_FINISH_REASONS = {types_pb2.FINISH_REASON_STOP: "stop", types_pb2.FINISH_REASON_LENGTH: "length"}


class RewardServicer(reward_pb2_grpc.RewardServiceServicer):
    """Serves one open run at a time. `Score` changes no state, so it can be retried and spread over replicas."""

    def __init__(self, metrics: RewardMetrics | None = None) -> None:
        self._metrics = metrics or RewardMetrics()
        self._run: ScoringRun | None = None
        self._opened = NO_RUN
        self._changing = asyncio.Lock()

    async def GetInfo(self, request: pb.GetInfoRequest, context: Context) -> pb.GetInfoResponse:
        """Returns state and versions."""
        state, libraries = "open" if self._run else "idle", ("math-verify", "sympy")
        info = service_info("reward", state, run=self._opened, libraries=libraries)
        return pb.GetInfoResponse(info=info)

    async def OpenRun(self, request: pb.OpenRunRequest, context: Context) -> pb.OpenRunResponse:
        """Starts the scorers.

        Repeating the call changes nothing; a call with another run or config closes the open scorers first.

        Raises:
            InvalidInput: The config is invalid or a scorer cannot start.
        """
        if not request.run_id:
            raise InvalidInput("run_id: must not be empty", field="run_id")
        config = parse_json(RewardConfig, request.config_json)
        opened = OpenedRun(request.run_id, hashlib.sha256(request.config_json.encode()).hexdigest())
        async with self._changing:
            if self._run is None or opened != self._opened:
                await self._close()
                self._run, self._opened = await _open(config, self._metrics), opened
                log.info("run %s opened: %s", request.run_id, self._run.scorer)
            return pb.OpenRunResponse(scorer=self._run.scorer)

    @shielded
    async def CloseRun(self, request: pb.CloseRunRequest, context: Context) -> pb.CloseRunResponse:
        """Closes the scorers of the run; does nothing if it is not the open run."""
        async with self._changing:
            if request.run_id == self._opened.run_id:
                await self._close()
        return pb.CloseRunResponse()

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        """Scores the samples of one prompt group concurrently. Canceling the call kills the workers that work on it.

        Raises:
            PreconditionFailed: RUN_NOT_OPEN if no run is open, SCORER_CHANGED if another run than the caller's is.
            InvalidInput: There is no candidate, or a field cannot be parsed.
        """
        if self._run is None:
            raise PreconditionFailed("no run is open: call OpenRun first", reason=Reason.RUN_NOT_OPEN)
        if request.run_id != (opened := self._opened.run_id):
            message = (
                f"run {opened} opened its scorers on this service after run {request.run_id}: give each run its own "
                "reward service and start the earlier run again; it resumes"
            )
            raise PreconditionFailed(message, reason=Reason.SCORER_CHANGED)
        scorer = self._run.scorer
        items = _items(request)
        with self._metrics.scoring(len(items)):
            outcomes = await self._run.score(items)
        for sample, outcome in enumerate(outcomes):
            if outcome.failure:
                with within(group=request.prompt_id, sample=sample):
                    log.warning("prompt %s sample %d: %s", request.prompt_id, sample, outcome.failure)
        return pb.ScoreResponse(scores=[_to_message(outcome) for outcome in outcomes], scorer=scorer)

    async def close(self) -> None:
        """Closes the open run. Call it before the process ends."""
        async with self._changing:
            await self._close()

    async def _close(self) -> None:
        run, self._run, self._opened = self._run, None, NO_RUN
        if run:
            await run.close()


async def _open(config: RewardConfig, metrics: RewardMetrics) -> ScoringRun:
    run = ScoringRun(config, metrics)
    try:
        await run.open()
    except BaseException:  # cancellation too: no process may be left running
        await run.close()
        raise
    return run


def _items(request: pb.ScoreRequest) -> list[Item]:
    if not request.candidates:
        raise InvalidInput("candidates: a prompt group has at least one sample", field="candidates")
    extra = _parse_extra(request.extra_json)
    return [
        Item(
            prompt=request.prompt,
            answer=request.answer,
            extra=extra,
            completion=candidate.text,
            num_tokens=candidate.num_tokens,
            finish_reason=_finish_reason(candidate, index),
        )
        for index, candidate in enumerate(request.candidates)
    ]


def _parse_extra(text: str) -> dict[str, object]:
    try:
        extra = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"extra_json: not JSON: {error}", field="extra_json") from error
    if not isinstance(extra, dict):
        raise InvalidInput(f"extra_json: must be an object, not a {type(extra).__name__}", field="extra_json")
    return extra


def _finish_reason(candidate: pb.Candidate, index: int) -> str:
    if candidate.finish_reason not in _FINISH_REASONS:
        field = f"candidates[{index}].finish_reason"
        raise InvalidInput(f"{field}: {candidate.finish_reason} is neither STOP nor LENGTH", field=field)
    return _FINISH_REASONS[candidate.finish_reason]


def _to_message(outcome: Outcome) -> pb.Score:
    score = pb.Score(reward=outcome.reward, components=outcome.components)
    if outcome.failure:
        reason = f"FAILURE_REASON_{outcome.failure.reason}"
        score.failure.CopyFrom(pb.Failure(reason=reason, scorer=outcome.failure.scorer, message=outcome.failure.detail))
    return score
