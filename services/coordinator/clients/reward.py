"""Calls the reward services of a run, and counts what they could not score."""

import asyncio
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lockstep.reward.v1 import reward_pb2 as pb
from lockstep.reward.v1 import reward_pb2_grpc
from lockstep.reward.v1.reward_pb2_grpc import RewardServiceServicer as RewardService

from services.common.config.run import Config
from services.common.errors import DeadlineExceeded, LockstepError, PreconditionFailed, Reason, Unavailable
from services.common.rpc.client import Client, Renewal
from services.common.rpc.tls import LOCAL, Transport
from services.common.rpc.transfer import require_sealed
from services.common.tasks import gather
from services.coordinator.data.dialog import decode_completions
from services.coordinator.data.groups import SampledGroup, ScoredGroup
from services.coordinator.runs.clock import Busy
from services.coordinator.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

ENVIRONMENT = "environment"


@dataclass(frozen=True)
class Cause:
    """Why a prompt group or an episode has no reward."""

    source: str
    """`scorer` with its name, or `environment`."""
    reason: str
    message: str

    def __str__(self) -> str:
        return f"{self.source}: {self.reason}: {self.message}"

    @property
    def kind(self) -> tuple[str, str, str]:
        """Returns what is counted together: an exception's text may differ for each sample, but not its class."""
        return self.source, self.reason, self.message.partition(":")[0]


class FailureLog:
    """Counts failures by cause during one step or evaluation at a time."""

    def __init__(self, config: Config):
        self._effects = {"scorer": f"reward.on_failure: {config.reward.on_failure}"}
        if config.environment:
            self._effects[ENVIRONMENT] = (
                f"environment.max_retries: {config.environment.max_retries}, "
                f"environment.on_failure: {config.environment.on_failure}"
            )
        self._known: set[tuple[str, str, str]] = set()
        self._counts = Counter[tuple[str, str, str]]()
        self._last: dict[tuple[str, str, str], Cause] = {}
        self.last: Cause | None = None

    def add(self, cause: Cause, where: str) -> None:
        """Takes note of a failure. The log file has each of them, the terminal the first of its kind."""
        is_new = cause.kind not in self._known
        self._known.add(cause.kind)
        log.log(logging.WARNING if is_new else logging.INFO, "%s: %s", where, cause)
        self._counts[cause.kind] += 1
        self._last[cause.kind] = self.last = cause

    @contextmanager
    def counting(self, what: str, *, is_evaluation: bool) -> Iterator[None]:
        """Counts the failures of the `with` block, which `what` names, and logs one line for each of their kinds."""
        self._counts.clear()
        self.last = None
        try:
            yield
        finally:
            for kind, number in self._counts.items():
                cause = self._last[kind]
                is_episode = cause.source == ENVIRONMENT
                effect = self._effects[ENVIRONMENT if is_episode else "scorer"]
                if is_evaluation:
                    effect = "a sample without a reward counts as 0"
                failed = (
                    "failures of episodes, also of those played again" if is_episode else "prompts with failed samples"
                )
                log.warning("%s: %d %s (%s): %s", what, number, failed, effect, cause)


# Seconds that a run which was asked to stop waits for a service that it has lost.
_STOPPING_S = 30.0


class Reward:
    """Scores groups. Decodes tokens to the text that the scorers read; nothing else uses that text."""

    def __init__(
        self,
        address: str,
        config: Config,
        transport: Transport = LOCAL,
        failure_log: FailureLog | None = None,
        is_stopping: Callable[[], bool] = lambda: False,
    ):
        self._client = Client(address, reward_pb2_grpc.RewardServiceStub, transport)
        self._config, self._timeouts, self._renewal = config.reward, config.timeouts, Renewal()
        self._environment_json = config.environment.model_dump_json() if config.environment else ""
        self._answer_column = config.data.answer_column
        self._num_answers = 0
        self.failures = Counter[str]()
        """Number of training groups with a failure, by scorer and reason."""
        self._failure_log = failure_log or FailureLog(config)
        self._is_stopping = is_stopping
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
            run_id=run_id,
            config_json=self._config.model_dump_json(),
            environment_json=self._environment_json,
            answer_column=self._answer_column,
        )
        self._renewal.begin(self._client, RewardService.GetInfo, pb.GetInfoRequest(), self._timeouts.lease_s)
        # A service that was stopped together with the run does not come back.
        limit_s = min(_STOPPING_S, self._timeouts.open_s) if self._is_stopping() else self._timeouts.open_s
        opened = await self._client.call_starting(RewardService.OpenRun, request, timeout_s=limit_s)
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
        # In a thread, because decoding takes most of a group's time here and leaves the interpreter to others.
        request, answer = await asyncio.to_thread(self._request, group, tokenizer), None
        while answer is None:
            # Noted before the call, to see afterwards whether another call has reopened the service, and whether it has
            # scored anything.
            num_opens, num_answers = self.num_opens, self._num_answers
            try:
                scored = await self._client.call(RewardService.Score, request, timeout_s=self._timeouts.score_s)
                answer = require_sealed(request, scored)
            except DeadlineExceeded as error:  # another try, if the service scored other groups meanwhile
                if self._num_answers == num_answers:  # nothing was scored: it hangs
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
        if failed:
            if not keep_failed:
                self.failures.update({f"{failure.scorer}/{reason_name(failure)}" for failure in failed})
            self._take_note(failed[0], group.prompt.prompt_id)
            if not keep_failed and self._config.on_failure == "drop_group":
                return None
        return ScoredGroup(**vars(group), scores=answer.scores, scorer=answer.scorer)

    async def close(self) -> None:
        await self._renewal.end()
        await self._client.close()

    def _request(self, group: SampledGroup, tokenizer: Tokenizer) -> pb.ScoreRequest:
        prompt = group.prompt
        request = pb.ScoreRequest(
            run_id=self.run_id,
            prompt_id=prompt.prompt_id,
            prompt=prompt.text,
            answer=prompt.answer,
            answer_is_integer=prompt.answer_is_integer,
            extra_json=json.dumps(prompt.extra),
        )
        if prompt.messages[0]["role"]:
            for message in prompt.messages:
                request.messages.add(role=str(message["role"]), content=str(message.get("content") or ""))
        num_samples = len(group.completions)
        pairs = zip(group.completions, group.episodes or [None] * num_samples, strict=True)
        turns = [episode.turns(completion.tokens) if episode else [completion.tokens] for completion, episode in pairs]
        texts = decode_completions([own[-1] if own else () for own in turns], tokenizer)  # scorers judge the last turn
        left_behind = group.left or [None] * num_samples
        for completion, own, text, left in zip(group.completions, turns, texts, left_behind, strict=True):
            candidate = {"text": text, "num_tokens": sum(map(len, own))}
            if left:
                result = pb.AgentResult(exit_code=left.exit_code, files=left.files)
                candidate = {"text": left.text, "num_tokens": left.num_tokens, "agent": result}
            elif own and self.opened.reads_tokens:
                candidate["tokens"] = own[-1]
            request.candidates.add(finish_reason=completion.finish_reason, **candidate)
        return request

    async def reopen(self, num_opens: int, *, why: str) -> None:
        """Opens the run again on a service that was lost when it had been opened `num_opens` times."""
        async with self._opening:
            if self.num_opens == num_opens:  # only the first of the calls that failed reopens it
                log.warning("lost the reward service; waiting for it to come back: %s", why)
                await self.open(self.run_id)

    def _require_same(self, scorer: str, environment: str) -> None:
        opened = self.opened
        pairs = ("scorers", scorer, opened.scorer), ("environment", environment, opened.environment)
        for what, now, before in pairs if self.num_opens else ():
            if now != before:
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


class Rewards:
    """Sends each group to the reward service with the fewest groups in progress."""

    def __init__(
        self,
        addresses: Sequence[str],
        config: Config,
        transport: Transport = LOCAL,
        is_stopping: Callable[[], bool] = lambda: False,
    ):
        self.failure_log = FailureLog(config)
        self.services = [Reward(at, config, transport, self.failure_log, is_stopping) for at in addresses]
        self.busy = Busy()
        self._in_progress = dict.fromkeys(self.services, 0)

    async def open(self, run_id: str) -> None:
        """Starts the scorers and the environment on every service.

        Raises:
            PreconditionFailed: SCORER_CHANGED, the services have different versions.
        """
        await gather(service.open(run_id) for service in self.services)
        for service in self.services[1:]:
            for name in ("scorer", "environment"):
                if (mine := getattr(self.opened, name)) != (others := getattr(service.opened, name)):
                    message = f"{self.services[0].address} has {mine}, but {service.address} has {others}"
                    raise PreconditionFailed(f"{message}: install one version", reason=Reason.SCORER_CHANGED)

    @property
    def opened(self) -> pb.OpenRunResponse:
        """Returns what every service has answered to OpenRun."""
        return self.services[0].opened

    async def score(
        self, group: SampledGroup, tokenizer: Tokenizer, *, keep_failed: bool = False
    ) -> ScoredGroup | None:
        """Does the same as `Reward.score`, on the service with the fewest groups in progress."""
        service = min(self.services, key=lambda service: self._in_progress[service])
        self._in_progress[service] += 1
        try:
            with self.busy.working():
                return await service.score(group, tokenizer, keep_failed=keep_failed)
        finally:
            self._in_progress[service] -= 1

    def take_failures(self) -> dict[str, float]:
        """Returns the number of training groups with a failure since the last call, by scorer and reason."""
        total = sum((service.failures for service in self.services), Counter[str]())
        for service in self.services:
            service.failures.clear()
        return {name: float(number) for name, number in total.items()}

    async def close(self) -> None:
        await gather(service.close() for service in self.services)
