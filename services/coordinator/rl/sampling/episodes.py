"""Plays episodes: the policy and an environment take turns on one stream of tokens, all sampled from one stamp."""

import logging
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.reward.v1.environment_pb2 import Message
from lockstep.reward.v1.reward_pb2 import Failure, FailureReason, Score
from lockstep.types.v1.types_pb2 import Completion, FinishReason

from services.common.batches.batch import join_sampling_masks
from services.common.config.run import Config
from services.common.errors import InvalidInput, PreconditionFailed, Reason
from services.common.rewards import total, weighted_sum
from services.common.tasks import gather
from services.common.telemetry.context import within
from services.common.telemetry.trace import span
from services.coordinator.clients.environment import EnvironmentFailure, Environments, EpisodeClient, EpisodeFailed
from services.coordinator.clients.reward import ENVIRONMENT, Cause, Rewards
from services.coordinator.clients.rollout import Affinity, Rollout
from services.coordinator.data.dialog import Dialog, OverlongPrompt
from services.coordinator.data.groups import Episode, SampledGroup, ScoredGroup, Stream
from services.coordinator.data.order import environment_seed, seed_of
from services.coordinator.data.prompts import Prompt
from services.coordinator.fleet.opening import Services
from services.coordinator.rl.sampling.collect import Collector, PromptRequest
from services.coordinator.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Taken = tuple[Sequence[int], Sequence[Message]]
"""The policy's tokens of a turn, with the environment's reply."""
_NUM_COMPARED = 32
"""Number of episodes of several turns that are rendered again, after each start."""
# Others may end an episode so often before it is played alone: a worker alone plays fewer episodes at a time.
_MOST_HURT = 3
# Why a sample has no score, by why its episode failed; any other failure is an error.
_SCORE_REASONS = {
    EnvironmentFailure.TIMEOUT: FailureReason.FAILURE_REASON_TIMEOUT,
    EnvironmentFailure.SET_ASIDE: FailureReason.FAILURE_REASON_TIMEOUT,
    EnvironmentFailure.CRASHED: FailureReason.FAILURE_REASON_CRASHED,
    EnvironmentFailure.NEIGHBOR: FailureReason.FAILURE_REASON_CRASHED,
    EnvironmentFailure.LOST: FailureReason.FAILURE_REASON_CRASHED,
    EnvironmentFailure.UNSPECIFIED: FailureReason.FAILURE_REASON_UNSPECIFIED,
}


@dataclass(frozen=True)
class _Played:
    prompt: Prompt
    completion: Completion
    episode: Episode
    failure: EpisodeFailed | None = None
    routed_experts: bytes = b""
    sampling_mask: bytes = b""


class EpisodeCollector(Collector):
    """Collects groups whose samples are episodes. Each episode advances on its own."""

    def __init__(
        self, rollout: Rollout, rewards: Rewards, tokenizer: Tokenizer, config: Config, environments: Environments
    ):
        super().__init__(rollout, rewards, tokenizer, config.seed)
        assert config.environment, "make_collector has checked"
        self._settings, self._environments = config.environment, environments
        self._drops_overlong = config.data.overlong == "drop"
        self._dialog, self._max_tokens = make_dialog(tokenizer, environments, config), config.max_response_tokens
        self._counts: Counter[str] = Counter()
        self._to_compare, self._differs = _NUM_COMPARED, False
        self._set_aside: set[str] = set()
        self._dangerous: dict[str, set[int]] = {}  # prompt id -> samples that hung or ended their worker

    async def one(self, index: int, prompt: Prompt, request: PromptRequest) -> ScoredGroup | None:
        """Plays and scores the episodes of one prompt. Returns None if a failure drops the group."""
        with within(group=prompt.prompt_id), span("group", group=prompt.prompt_id, samples=request.num_samples):
            try:
                played = await gather(self._play(prompt, request, sample) for sample in range(request.num_samples))
            except EpisodeFailed as error:  # the request keeps no failed episode, and the others are no whole group
                if self._settings.on_failure == "fail" and error.failure is not EnvironmentFailure.OVERLONG:
                    raise
                return None
            routed_experts = [one.routed_experts for one in played]
            sampling_masks = [one.sampling_mask for one in played]
            group = SampledGroup(
                index,
                _shared_prompt(played),
                [one.completion for one in played],
                request.stamp,
                episodes=[one.episode for one in played],
                routed_experts=routed_experts if any(routed_experts) else [],
                sampling_mask=sampling_masks if any(sampling_masks) else [],
            )
            with self._rewards.least_loaded() as reward:
                scored = await reward.score(group, self._tokenizer, keep_failed=request.keep_failed)
        if scored is None:
            return None
        return replace(scored, scores=[self._total(*pair) for pair in zip(scored.scores, played, strict=True)])

    def take_metrics(self) -> dict[str, float]:
        """Returns the number of failed episodes by reason and of prompts that were set aside, the share of tokens that
        the prefix cache had, and the share of tool calls that were answered with an error.
        """
        counts, self._counts = self._counts, Counter()
        counts.update({"set_aside": len(self._set_aside)} if self._set_aside else {})
        self._set_aside = set()
        reused, cached = counts.pop("reused", 0), counts.pop("cached", 0)
        calls, errors = counts.pop("tool_calls", 0), counts.pop("tool_errors", 0)
        metrics = {f"environment/{name}": float(number) for name, number in sorted(counts.items())}
        metrics |= {"environment/cache_hit_share": cached / reused} if reused else {}
        metrics |= {"environment/tool_error_share": errors / calls} if calls else {}
        return super().take_metrics() | metrics

    async def _play(self, prompt: Prompt, request: PromptRequest, sample: int) -> _Played:
        """Plays one episode; again, with the same seeds, if the environment fails.

        An episode that hurts the others of its worker is played again alone, and so are all of its prompt until it ends
        well. What may be the fault of others does not count as a retry.

        Raises:
            EpisodeFailed: The environment still fails, and the request keeps no failed episodes.
        """
        num_left, num_hurt, alone = self._settings.max_retries + 1, 0, prompt.prompt_id in self._dangerous
        while True:
            try:
                async with self._environments.episode(f"{prompt.prompt_id}/{sample}/{uuid.uuid4().hex}") as client:
                    played = await self._take_turns(client, prompt, request, sample, alone=alone)
                dangerous = self._dangerous.get(prompt.prompt_id, set())
                dangerous.discard(sample)
                if not dangerous:
                    self._dangerous.pop(prompt.prompt_id, None)
                return played
            except EpisodeFailed as error:
                failure, where = error, f"prompt {prompt.prompt_id} sample {sample}"
                self._counts[f"failed_{error.failure}"] += 1
                if not alone and error.failure is EnvironmentFailure.NEIGHBOR:
                    num_hurt += 1
                elif alone or not error.alone:  # in a worker of its own, every failure is its own
                    num_left -= 1
                if alone and error.failure is EnvironmentFailure.TIMEOUT:  # it would hang each time
                    num_left = 0
                    self._set_aside.add(prompt.prompt_id)
                    detail = f"hangs again, alone in a worker: {where}: {error.detail}"
                    failure = EpisodeFailed(EnvironmentFailure.SET_ASIDE, detail)
                self.failure_log.add(Cause(ENVIRONMENT, failure.failure, failure.detail), where)
                if error.alone:
                    self._dangerous.setdefault(prompt.prompt_id, set()).add(sample)
                alone = alone or num_hurt >= _MOST_HURT or prompt.prompt_id in self._dangerous
            if num_left <= 0 or failure.failure is EnvironmentFailure.OVERLONG:
                break
        if not request.keep_failed:
            raise failure
        return _Played(
            prompt,
            Completion(finish_reason=FinishReason.FINISH_REASON_STOP),
            Episode((), (), (), environment=""),
            failure,
        )

    async def _take_turns(
        self, client: EpisodeClient, prompt: Prompt, request: PromptRequest, sample: int, *, alone: bool
    ) -> _Played:
        messages = await client.reset(environment_seed(self._seed, prompt.prompt_id), prompt, alone=alone)
        first = self._begin(prompt, messages)
        stream, affinity = Stream(first.tokens), Affinity()
        reason = FinishReason.FINISH_REASON_TURN_LIMIT
        taken: list[Taken] = []
        for turn in range(self._settings.max_turns):
            context = replace(first, tokens=stream.context)
            params = self._params(request, self._max_tokens - len(stream.tokens))
            seeds = [self._turn_seed(prompt, request, sample, turn)]
            group = await self._rollout.generate(0, context, seeds, params, request.stamp, affinity)
            _require_stamp(group, request, sample, turn)
            (completion,) = group.completions
            self._count_drafts(group, request)
            if turn:
                self._counts.update(reused=stream.num_seen, cached=group.num_cached_tokens)
            stream.add_turn(completion, *(group.routed_experts or [b""]), *group.sampling_mask)
            text = self._dialog.text(completion.tokens)
            reasons = self._dialog.opens_reasoning(context.tokens)
            reply = await client.step(text, len(completion.tokens), completion.finish_reason, is_reasoning=reasons)
            self._counts.update(tool_calls=reply.num_calls, tool_errors=reply.num_failed_calls)
            stream.rewards.append(weighted_sum([(self._settings.weight, reply.reward)]))
            if reply.done:
                reason = completion.finish_reason
                break
            added = self._dialog.reply(completion.tokens, reply.messages)
            if len(stream.tokens) + len(added) >= self._max_tokens:
                reason = FinishReason.FINISH_REASON_LENGTH
                break
            if turn + 1 < self._settings.max_turns:
                stream.add_context(added)
                taken.append((completion.tokens, reply.messages))
        self._compare(prompt, messages, taken, sample)
        completion, episode = stream.end(reason, self._turn_seed(prompt, request, sample, 0), client.environment)
        has_masks = any(mask for mask, _ in stream.sampling_mask)
        sampling_mask = join_sampling_masks(stream.sampling_mask) if has_masks else b""
        routed_experts = bytes(stream.routed_experts)
        return _Played(first, completion, episode, routed_experts=routed_experts, sampling_mask=sampling_mask)

    def _begin(self, prompt: Prompt, messages: Sequence[Message]) -> Prompt:
        try:
            return self._dialog.begin(prompt, messages)
        except OverlongPrompt as error:
            if not self._drops_overlong:
                raise
            raise EpisodeFailed(EnvironmentFailure.OVERLONG, error.message) from error

    def _compare(self, prompt: Prompt, messages: Sequence[Message], taken: Sequence[Taken], sample: int) -> None:
        """Renders one of the first episodes of several turns again, and warns if the chat template changes its text."""
        if not taken or not self._to_compare:
            return
        self._to_compare -= 1
        try:
            self._dialog.check_played(prompt, messages, taken)
        except InvalidInput as error:
            self._counts["rendered_differently"] += 1
            log.log(
                logging.INFO if self._differs else logging.WARNING,
                "prompt %s sample %d: a program that renders the conversation with the chat template will not show the "
                "model the text that it is trained on: %s",
                *(prompt.prompt_id, sample, error.message),
            )
            self._differs = True

    def _turn_seed(self, prompt: Prompt, request: PromptRequest, sample: int, turn: int) -> int:
        """Returns the seed of a turn; that of the first is the seed of a single completion."""
        return seed_of(self._seed, request.step, prompt.prompt_id, sample, *([turn] if turn else []))

    def _total(self, score: Score, played: _Played) -> Score:
        """Returns the score with the environment's reward; a failed episode has a failure and no reward."""
        if played.failure:
            reason = _SCORE_REASONS.get(played.failure.failure, FailureReason.FAILURE_REASON_ERROR)
            return Score(failure=Failure(reason=reason, scorer=ENVIRONMENT, message=played.failure.message))
        whole = Score()
        whole.CopyFrom(score)
        whole.components["environment"] = played.episode.reward
        whole.reward = total([score.reward, *played.episode.turn_rewards])
        return whole


def make_dialog(tokenizer: Tokenizer, environments: Environments, config: Config) -> Dialog:
    """Returns the dialog of the open environments.

    Raises:
        InvalidInput: The chat template changes earlier turns, or cannot render the environment's messages. A model
            without a chat template is not refused: its environment may send raw text only.
    """
    dialog = Dialog(tokenizer, environments.tools, config)
    dialog.check(environments.roles)
    return dialog


def make_collector(services: Services, tokenizer: Tokenizer, config: Config) -> Collector:
    """Returns the collector of episodes if the run has an environment, else that of single completions."""
    if services.environments is None:
        return Collector(services.rollout, services.reward, tokenizer, config.seed)
    return EpisodeCollector(services.rollout, services.reward, tokenizer, config, services.environments)


def _require_stamp(turn_of: SampledGroup, request: PromptRequest, sample: int, turn: int) -> None:
    """Checks that a turn comes from the stamp that its whole sample will carry to the trainer."""
    if turn_of.stamp != request.stamp:
        raise PreconditionFailed(
            f"prompt {turn_of.prompt.prompt_id} sample {sample}: turn {turn} was sampled from version "
            f"{turn_of.stamp.version} ({turn_of.stamp.digest[:8]}), and not from version {request.stamp.version} "
            f"({request.stamp.digest[:8]}) like the others; see the log of the replica",
            reason=Reason.STALE_STAMP,
        )


def _shared_prompt(played: Sequence[_Played]) -> Prompt:
    """Returns the first prompt of all episodes of a group."""
    prompts = [one.prompt for one in played if not one.failure] or [played[0].prompt]
    if any(prompt.tokens != prompts[0].tokens for prompt in prompts):
        raise InvalidInput(
            f"environment: reset gave prompt {prompts[0].prompt_id} other first messages with the same seed; all "
            "samples of a prompt must begin alike, since they are compared with one another",
            field="environment",
        )
    return prompts[0]
