"""The reward service on the wire: lockstep.reward.v1."""

import asyncio
import hashlib
import json
import logging
from typing import Any

from lockstep.reward.v1 import reward_pb2 as pb
from lockstep.reward.v1 import reward_pb2_grpc
from lockstep.types.v1 import types_pb2

from services.common.config.load import parse_json
from services.common.config.reward.section import RewardConfig
from services.common.errors import InvalidInput, PreconditionFailed, Reason
from services.common.rpc.server import NO_RUN, OpenedRun, service_info
from services.common.tasks import shielded
from services.common.telemetry.context import within
from services.reward.metrics import RewardMetrics
from services.reward.run import Outcome, ScoringRun
from services.reward.scorers.base import Item

log = logging.getLogger(__name__)

NAME = "lockstep.reward.v1.RewardService"
_FINISH_REASONS = {types_pb2.FINISH_REASON_STOP: "stop", types_pb2.FINISH_REASON_LENGTH: "length"}


class RewardServicer(reward_pb2_grpc.RewardServiceServicer):
    """One open run at a time. `Score` changes nothing, so it can be repeated and spread over replicas."""

    def __init__(self, metrics: RewardMetrics | None = None) -> None:
        self._metrics = metrics or RewardMetrics()
        self._run: ScoringRun | None = None
        self._opened = NO_RUN
        self._changing = asyncio.Lock()

    async def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.GetInfoResponse:
        """State and versions."""
        state, libraries = "open" if self._run else "idle", ("math-verify", "sympy")
        info = service_info("reward", state, run=self._opened, libraries=libraries)
        return pb.GetInfoResponse(info=info)

    async def OpenRun(self, request: pb.OpenRunRequest, context: Any) -> pb.OpenRunResponse:
        """Starts the scorers. The same again changes nothing; another run or config ends the scorers that are open.

        Raises:
            InvalidInput: The config is wrong or a scorer cannot start.
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
    async def CloseRun(self, request: pb.CloseRunRequest, context: Any) -> pb.CloseRunResponse:
        """Ends the scorers of the run; nothing to do if it is not the open one."""
        async with self._changing:
            if request.run_id == self._opened.run_id:
                await self._close()
        return pb.CloseRunResponse()

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        """Scores one prompt group, its samples at once. Cancelling the call kills the workers that are busy with it.

        Raises:
            PreconditionFailed: No run is open, or SCORER_CHANGED, another than the caller's.
            InvalidInput: There is no candidate, or a field cannot be read.
        """
        if self._run is None:
            raise PreconditionFailed("no run is open: call OpenRun first", reason=Reason.RUN_NOT_OPEN)
        if request.run_id != (opened := self._opened.run_id):
            message = (
                f"run {opened} opened its scorers here after run {request.run_id}: give each run a reward service of "
                "its own, and start that one again; it resumes"
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
        """Closes the open run, for the end of the process."""
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
    except BaseException:  # cancellation too: no process may stay behind
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


def _parse_extra(text: str) -> dict[str, Any]:
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
        reason = pb.FailureReason.Value(f"FAILURE_REASON_{outcome.failure.reason}")
        score.failure.CopyFrom(pb.Failure(reason=reason, scorer=outcome.failure.scorer, message=outcome.failure.detail))
    return score
