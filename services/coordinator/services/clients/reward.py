"""Calls the reward service. Applies `reward.on_failure` to groups with a sample that could not be scored."""

import asyncio
import json
import logging
import math
from collections import Counter

from lockstep.reward.v1 import reward_pb2 as pb
from lockstep.reward.v1 import reward_pb2_grpc
from lockstep.reward.v1.reward_pb2_grpc import RewardServiceServicer as RewardService

from services.common.config.run import Config
from services.common.errors import DeadlineExceeded, LockstepError, PreconditionFailed, Reason, Unavailable
from services.common.files.transfer import require_sealed
from services.common.rpc.client import Client
from services.common.rpc.retry import MAX_RETRY_S
from services.common.rpc.security.tls import LOCAL, Transport
from services.coordinator.data.episodes import final_text, num_sampled
from services.coordinator.data.groups import SampledGroup, ScoredGroup
from services.coordinator.services.clients.failure_log import Cause, FailureLog
from services.coordinator.services.clients.renewal import Renewal
from services.coordinator.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Reward:
    """Scores groups. Decodes tokens to the text that the scorers read; nothing else uses that text."""

    def __init__(
        self, address: str, config: Config, transport: Transport = LOCAL, failure_log: FailureLog | None = None
    ):
        self._client = Client(address, reward_pb2_grpc.RewardServiceStub, transport)
        self._config, self._timeouts, self._renewal = config.reward, config.timeouts, Renewal()
        self._environment_json = config.environment.model_dump_json() if config.environment else ""
        self._num_answers = 0
        self.failures = Counter[str]()
        """Number of training groups with a failure, by scorer and reason."""
        self._failure_log = failure_log or FailureLog(config)
        self._opening = asyncio.Lock()
        self.address, self.run_id, self.num_opens = address, "", 0
        self.opened = pb.OpenRunResponse()
        """The service's first answer to OpenRun; the scorers and the environment never change after it."""

    async def open(self, run_id: str) -> None:
        """Starts the scorers and the environment.

        Raises:
            DataLoss: The samples or their scores changed on the way.
            PreconditionFailed: SCORER_CHANGED, they are not those of the first call.
        """
        self.run_id = run_id
        request = pb.OpenRunRequest(
            run_id=run_id, config_json=self._config.model_dump_json(), environment_json=self._environment_json
        )
        self._renewal.begin(self._client, RewardService.GetInfo, pb.GetInfoRequest(), self._timeouts.lease_s)
        opened = await self._client.call(
            RewardService.OpenRun,
            request,
            timeout_s=self._timeouts.open_s,
            wait_for_ready=True,
            max_retry_s=MAX_RETRY_S,
        )
        self._require_same(opened.scorer, opened.environment)
        self.opened = opened
        self.num_opens += 1

    async def score(
        self, group: SampledGroup, tokenizer: Tokenizer, *, keep_failed: bool = False
    ) -> ScoredGroup | None:
        """Returns the group with its scores, or None if `reward.on_failure` drops it. Waits for a restarting service.

        With `keep_failed` no group is dropped: a sample that could not be scored gets a reward of 0.

        Raises:
            LockstepError: REWARD_FAILED if `reward.on_failure` is fail and a sample could not be scored.
            LockstepError: REWARD_FAILED if a reward or score is not finite; the message names prompt and sample.
            DataLoss: The samples or their scores changed on the way.
            PreconditionFailed: SCORER_CHANGED, the scores come from other scorers than those that were opened.
        """
        request, answer = self._request(group, tokenizer), None
        while answer is None:
            num_opens, num_answers = self.num_opens, self._num_answers
            try:
                scored = await self._client.call(RewardService.Score, request, timeout_s=self._timeouts.score_s)
                answer = require_sealed(request, scored)
            except DeadlineExceeded as error:  # another try, if the service scored other groups meanwhile
                if self._num_answers == num_answers:
                    raise
                log.warning("prompt %s waits, the reward service is busy: %s", request.prompt_id, error.message)
            except LockstepError as error:
                if not isinstance(error, Unavailable) and error.reason is not Reason.RUN_NOT_OPEN:
                    raise
                await self.reopen(num_opens, why=error.message)
        self._num_answers += 1
        self._require_same(answer.scorer, self.opened.environment)
        self._require_finite(answer, group.prompt.prompt_id)
        failed = [score.failure for score in answer.scores if score.HasField("failure")]
        if failed and not keep_failed:
            self.failures[f"{failed[0].scorer}/{reason_name(failed[0])}"] += 1
        if failed:
            self._take_note(failed[0], group.prompt.prompt_id)
            if not keep_failed and self._config.on_failure == "drop_group":
                return None
        return ScoredGroup(**vars(group), scores=answer.scores, scorer=answer.scorer)

    async def close(self) -> None:
        """Closes the channel."""
        await self._renewal.end()
        await self._client.close()

    def _request(self, group: SampledGroup, tokenizer: Tokenizer) -> pb.ScoreRequest:
        candidates = [
            pb.Candidate(
                text=final_text(completion, group.episode(sample), tokenizer),
                num_tokens=num_sampled(completion, group.episode(sample)),
                finish_reason=completion.finish_reason,
            )
            for sample, completion in enumerate(group.completions)
        ]
        return pb.ScoreRequest(
            prompt_id=group.prompt.prompt_id,
            prompt=group.prompt.text,
            answer=group.prompt.answer,
            extra_json=json.dumps(group.prompt.extra),
            candidates=candidates,
            run_id=self.run_id,
        )

    async def reopen(self, num_opens: int, *, why: str) -> None:
        """Opens the run again on a service that was lost when it had been opened `num_opens` times."""
        async with self._opening:
            if self.num_opens == num_opens:  # only the first of the calls that failed reopens it
                log.warning("lost the reward service; waiting for it to come back: %s", why)
                await self.open(self.run_id)

    def _require_same(self, scorer: str, environment: str) -> None:
        for what, now, before in (
            ("scorers", scorer, self.opened.scorer),
            ("environment", environment, self.opened.environment),
        ):
            if self.num_opens and now != before:
                message = (
                    f"{self.address}: the reward service has {what} {now}, but this run opened {before}: it was "
                    "restarted with another version; restart it with the previous version, or restart the run"
                )
                raise PreconditionFailed(message, reason=Reason.SCORER_CHANGED)

    def _require_finite(self, answer: pb.ScoreResponse, prompt_id: str) -> None:
        for sample, score in enumerate(answer.scores):
            numbers = {"reward": score.reward, **score.components}
            bad = [f"{name} is {number}" for name, number in numbers.items() if not math.isfinite(number)]
            if bad:
                message = f"prompt {prompt_id} sample {sample}: {', '.join(bad)} (scorer {answer.scorer})"
                raise LockstepError(message, reason=Reason.REWARD_FAILED)

    def _take_note(self, failure: pb.Failure, prompt_id: str) -> None:
        cause = Cause(f"scorer {failure.scorer}", reason_name(failure), failure.message)
        if self._config.on_failure == "fail":
            raise LockstepError(f"prompt {prompt_id}: {cause}", reason=Reason.REWARD_FAILED)
        self._failure_log.add(cause, f"prompt {prompt_id}")


def reason_name(failure: pb.Failure) -> str:
    """Returns the word of a failure's reason, also if the service knows reasons that this coordinator does not."""
    is_known = failure.reason in pb.FailureReason.values()
    return (pb.FailureReason.Name(failure.reason) if is_known else "UNSPECIFIED").removeprefix("FAILURE_REASON_")
