"""Client of the reward service. Applies `reward.on_failure` to groups with a sample that could not be scored."""

import asyncio
import json
import logging

from lockstep.reward.v1 import reward_pb2 as pb
from lockstep.reward.v1 import reward_pb2_grpc
from lockstep.reward.v1.reward_pb2_grpc import RewardServiceServicer as RewardService

from services.common.config.run import Config
from services.common.errors import LockstepError, PreconditionFailed, Reason, Unavailable
from services.common.rpc.client import Client
from services.common.rpc.tls import LOCAL, Transport
from services.coordinator.data.groups import SampledGroup, ScoredGroup
from services.coordinator.data.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Reward:
    """Scores groups. Decodes tokens to the text that the scorers read; nothing else uses that text."""

    def __init__(self, address: str, config: Config, transport: Transport = LOCAL):
        self._client = Client(address, reward_pb2_grpc.RewardServiceStub, transport)
        self._address, self._config, self._timeouts = address, config.reward, config.timeouts
        self._run_id, self._num_opens, self._scorer = "", 0, ""
        self._opening = asyncio.Lock()

    async def open(self, run_id: str) -> None:
        """Starts the scorers.

        Raises:
            PreconditionFailed: SCORER_CHANGED, the scorers are not those of the first call.
        """
        self._run_id = run_id
        request = pb.OpenRunRequest(run_id=run_id, config_json=self._config.model_dump_json())
        opened = await self._client.call(
            RewardService.OpenRun, request, timeout_s=self._timeouts.open_s, wait_for_ready=True
        )
        self._require_same(opened.scorer)
        self._num_opens += 1

    async def score(
        self, group: SampledGroup, tokenizer: Tokenizer, *, keep_failed: bool = False
    ) -> ScoredGroup | None:
        """Returns the group with its scores, or None if `reward.on_failure` drops it. Waits for a restarting service.

        With `keep_failed` no group is dropped: a sample that could not be scored gets a reward of 0.

        Raises:
            LockstepError: REWARD_FAILED if `reward.on_failure` is fail and a sample could not be scored.
            PreconditionFailed: SCORER_CHANGED, the scores come from other scorers than those that were opened.
        """
        request, answer = self._request(group, tokenizer), None
        while answer is None:
            num_opens = self._num_opens
            try:
                answer = await self._client.call(RewardService.Score, request, timeout_s=self._timeouts.score_s)
            except LockstepError as error:
                if not isinstance(error, Unavailable) and error.reason is not Reason.RUN_NOT_OPEN:
                    raise
                await self._reopen(num_opens, why=error.message)
        self._require_same(answer.scorer)
        failed = [score.failure for score in answer.scores if score.HasField("failure")]
        if failed and not self._tolerate(failed[0], group.prompt.prompt_id) and not keep_failed:
            return None
        return ScoredGroup(**vars(group), scores=answer.scores, scorer=answer.scorer)

    async def close(self) -> None:
        """Closes the channel."""
        await self._client.close()

    def _request(self, group: SampledGroup, tokenizer: Tokenizer) -> pb.ScoreRequest:
        candidates = [
            pb.Candidate(
                text=tokenizer.decode(completion.tokens),
                num_tokens=len(completion.tokens),
                finish_reason=completion.finish_reason,
            )
            for completion in group.completions
        ]
        return pb.ScoreRequest(
            prompt_id=group.prompt.prompt_id,
            prompt=group.prompt.text,
            answer=group.prompt.answer,
            extra_json=json.dumps(group.prompt.extra),
            candidates=candidates,
            run_id=self._run_id,
        )

    async def _reopen(self, num_opens: int, *, why: str) -> None:
        async with self._opening:
            if self._num_opens == num_opens:  # only the first of the calls that failed reopens it
                log.warning("lost the reward service; waiting for it to come back: %s", why)
                await self.open(self._run_id)

    def _require_same(self, scorer: str) -> None:
        self._scorer = self._scorer or scorer
        if scorer != self._scorer:
            message = (
                f"{self._address}: the reward service has scorers {scorer}, but this run opened {self._scorer}: it was "
                "restarted with another version; restart it with the previous version, or restart the run"
            )
            raise PreconditionFailed(message, reason=Reason.SCORER_CHANGED)

    def _tolerate(self, failure: pb.Failure, prompt_id: str) -> bool:
        reason = pb.FailureReason.Name(failure.reason).removeprefix("FAILURE_REASON_")
        message = f"prompt {prompt_id}: scorer {failure.scorer}: {reason}: {failure.message}"
        if self._config.on_failure == "fail":
            raise LockstepError(message, reason=Reason.REWARD_FAILED)
        log.warning("%s (reward.on_failure: %s)", message, self._config.on_failure)
        return self._config.on_failure == "zero"
