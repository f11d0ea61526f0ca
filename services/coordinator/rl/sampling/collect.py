"""Samples and scores prompts; each group is scored while others are still being generated. Plays the episodes of
groups, again if an environment fails.
"""

import json
import os
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from lockstep.reward.v1.reward_pb2 import Failure, FailureReason, Score
from lockstep.rollout.v1.rollout_pb2 import Drafts
from lockstep.types.v1.types_pb2 import Completion, FinishReason, PolicyStamp, SamplingParams, TokenSequence

from services.common.config.rollout import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, SamplingConfig
from services.common.config.run import Config
from services.common.errors import InvalidInput, LockstepError, PreconditionFailed, Reason
from services.common.files import write_whole, writing
from services.common.rewards import total
from services.common.tasks import gather
from services.common.telemetry import span, within
from services.coordinator.clients.environment import EnvironmentFailure, Environments, EpisodeFailed
from services.coordinator.clients.reward import ENVIRONMENT, Cause, Rewards
from services.coordinator.clients.rollout import Rollout
from services.coordinator.data.calls import CallLog, Left
from services.coordinator.data.groups import Episode, Row, SampledGroup, ScoredGroup
from services.coordinator.data.order import seed_of
from services.coordinator.data.prompts import Prompt
from services.coordinator.text.tokenizer import Tokenizer, stop_tokens


@dataclass(frozen=True)
class PromptRequest:
    num_samples: int
    sampling: SamplingConfig
    stamp: PolicyStamp
    step: int
    """Determines the seeds. It is the stamp's version, unless several batches are sampled from that version."""
    keep_failed: bool = False
    """Whether to keep all groups; a sample that could not be scored then gets a reward of 0."""

    @property
    def is_trained_on(self) -> bool:
        return not self.keep_failed

    @property
    def has_masks(self) -> bool:
        """Whether the samples have sampling masks. A greedy one keeps one token whatever the truncation is."""
        return self.sampling.is_truncated and self.sampling.temperature > 0 and self.is_trained_on


class Collector:
    """Samples and scores prompts with one tokenizer. All sampling seeds derive from the run's `seed`."""

    def __init__(self, rollout: Rollout, rewards: Rewards, tokenizer: Tokenizer, seed: int):
        self._rollout, self._rewards, self._tokenizer, self._seed = rollout, rewards, tokenizer, seed
        self._bad_words, self._drafts = cache(partial(token_sequences, tokenizer)), Drafts()
        self.failure_log = rewards.failure_log

    async def collect(
        self, name: str, prompts: Sequence[Prompt], num_samples: int, sampling: SamplingConfig, stamp: PolicyStamp
    ) -> list[ScoredGroup]:
        """Returns the scored group of every prompt of the set `name`, in the order of `prompts`. Drops none.

        Raises:
            LockstepError: REWARD_FAILED if no sample has a reward; the message names the set and the last failure.
        """
        request = PromptRequest(num_samples, sampling, stamp, stamp.version, keep_failed=True)
        with self.failure_log.counting(f"evaluation of {name}", is_evaluation=True):
            results = await gather(self.one(i, p, request) for i, p in enumerate(prompts))
        self.take_metrics()  # those of an evaluation are no step's
        groups = [group for group in results if group is not None]
        assert len(groups) == len(prompts), "keep_failed keeps every group"
        if all(group.is_failed.all() for group in groups):
            message = f"data.eval.{name}: none of {len(groups)} prompts has a sample with a reward: "
            raise LockstepError(f"{message}{self.failure_log.last}", reason=Reason.REWARD_FAILED)
        return groups

    async def one(self, index: int, prompt: Prompt, request: PromptRequest) -> ScoredGroup | None:
        """Samples and scores one prompt. Returns None if `reward.on_failure` drops the group."""
        params = self.params(request, request.sampling.max_tokens)
        # From nothing but these, so that a group has the same samples on any replica and when it is sampled again.
        seeds = [seed_of(self._seed, request.step, prompt.prompt_id, sample) for sample in range(request.num_samples)]
        with within(group=prompt.prompt_id), span("group", group=prompt.prompt_id, samples=request.num_samples):
            group = await self._rollout.generate(index, prompt, seeds, params, request.stamp)
            self._count_drafts(group, request)
            return await self._rewards.score(group, self._tokenizer, keep_failed=request.keep_failed)

    async def with_baseline(self, index: int, prompt: Prompt, request: PromptRequest) -> ScoredGroup | None:
        """Like `one`, with the reward of one greedy completion as the baseline."""
        greedy = replace(request, num_samples=1, sampling=request.sampling.model_copy(update={"temperature": 0.0}))
        group, baseline = await gather(self.one(index, prompt, each) for each in (request, greedy))
        # Without its baseline a group has no advantages, so it is dropped.
        return replace(group, baseline=float(baseline.rewards[0])) if group and baseline else None

    def take_metrics(self) -> dict[str, float]:
        drafts, self._drafts = self._drafts, Drafts()
        metrics = {f"sampling/failed/{name}": number for name, number in self._rewards.take_failures().items()}
        if drafts.num_drafts:
            metrics["speculation/drafted_tokens"] = float(drafts.num_drafted)
            metrics["speculation/accepted_tokens"] = float(drafts.num_accepted)
            metrics["speculation/accepted_per_draft"] = drafts.num_accepted / drafts.num_drafts
        return metrics | ({"speculation/draft_s": drafts.seconds} if drafts.num_drafts and drafts.seconds else {})

    def _count_drafts(self, group: SampledGroup, request: PromptRequest) -> None:
        if request.keep_failed:  # an evaluation is no part of a step
            return
        for field in Drafts.DESCRIPTOR.fields:
            setattr(self._drafts, field.name, getattr(self._drafts, field.name) + getattr(group.drafts, field.name))

    def params(self, request: PromptRequest, most: int) -> SamplingParams:
        """Returns how to sample a completion, with `most` tokens at most, as a message for the engine."""
        sampling = request.sampling
        max_tokens = min(sampling.max_tokens, most)
        return SamplingParams(
            temperature=sampling.temperature,
            max_tokens=max_tokens,
            min_tokens=min(sampling.min_tokens, max_tokens),
            bad_words=[TokenSequence(tokens=tokens) for tokens in self._bad_words(sampling.bad_words)],
            stop_token_ids=stop_tokens(self._tokenizer, sampling),
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            stop=sampling.stop,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            return_routed_experts=request.is_trained_on,
            return_sampling_mask=request.has_masks,
        )


def token_sequences(tokenizer: Tokenizer, bad_words: Sequence[str]) -> list[list[int]]:
    """Returns the same token sequences as vLLM's SamplingParams.update_from_tokenizer.

    Each word has one and, if it begins with another token after a space but is as long, one after a space too. That of
    a word without tokens is empty; vLLM would refuse the word.

    Raises:
        InvalidInput: See Tokenizer.encode.
    """
    sequences: list[list[int]] = []
    for word in dict.fromkeys(bad_words):
        alone, spaced = (tokenizer.encode(space + word.lstrip()) for space in ("", " "))
        sequences.append(alone)
        if spaced and len(spaced) == len(alone) and spaced[0] != alone[0]:
            sequences.append(spaced)
    return sequences


def check_words(tokenizer: Tokenizer, config: Config) -> None:
    """Checks the stop strings, and the bad words of training and of all evaluation sets.

    Raises:
        InvalidInput: A stop string has no text; a bad word has no tokens, there are too many, or no stop token could be
            sampled.
    """
    stops = stop_tokens(tokenizer, config.rollout.sampling)
    for text in filter(tokenizer.has_token, config.rollout.sampling.stop):
        if not tokenizer.decode(tokens := tokenizer.encode(text)) and not {*tokens} <= {*stops}:
            fix = f"set stop_token_ids to {tokens}, or add it to eos_token_id of the model's generation_config.json"
            message = f"rollout.sampling.stop: {text!r} is a special token and has no text to be found: {fix}"
            raise InvalidInput(message, field="rollout.sampling.stop")
    of_sets = {f"evaluation.sets.{name}": settings.bad_words for name, settings in config.evaluation.sets.items()}
    for section, bad_words in {"rollout.sampling": config.rollout.sampling.bad_words, **of_sets}.items():
        try:
            why = _why_not(tokenizer, bad_words, stops)
        except InvalidInput as error:
            why = error.message
        if why:
            raise InvalidInput(f"{section}.bad_words: {why}", field=f"{section}.bad_words")


def _why_not(tokenizer: Tokenizer, bad_words: Sequence[str], stops: Sequence[int]) -> str:
    """Returns why a completion cannot be sampled without `bad_words`; "" if it can."""
    sequences = token_sequences(tokenizer, bad_words)
    if not all(sequences):
        empty = next(word for word in bad_words if not all(token_sequences(tokenizer, [word])))
        return f"{empty!r} has no tokens that could be forbidden; leave it out"
    if len(sequences) > MAX_BAD_WORDS or sum(map(len, sequences)) > MAX_BAD_WORD_TOKENS:
        return (
            f"they are {len(sequences)} token sequences, with and without a space before, of "
            f"{sum(map(len, sequences))} tokens; vLLM takes at most {MAX_BAD_WORDS} with {MAX_BAD_WORD_TOKENS} tokens"
        )
    if stops and set(stops) <= {tokens[0] for tokens in sequences if len(tokens) == 1}:
        return f"they are all stop tokens ({stops}), so every completion would reach max_tokens; leave one of them out"
    return ""


# Others may end an episode so often before it is played alone: a worker alone plays fewer episodes at a time.
_MOST_HURT = 3
# The service may be lost so often during an episode; an episode that ends it each time must not be played forever.
_MOST_LOST = 5
# Why a sample has no score, by why its episode failed; any other failure is an error.
_SCORE_REASONS = {
    EnvironmentFailure.TIMEOUT: FailureReason.FAILURE_REASON_TIMEOUT,
    EnvironmentFailure.SET_ASIDE: FailureReason.FAILURE_REASON_TIMEOUT,
    EnvironmentFailure.CRASHED: FailureReason.FAILURE_REASON_CRASHED,
    EnvironmentFailure.NEIGHBOR: FailureReason.FAILURE_REASON_CRASHED,
    EnvironmentFailure.LOST: FailureReason.FAILURE_REASON_CRASHED,
    EnvironmentFailure.UNSPECIFIED: FailureReason.FAILURE_REASON_UNSPECIFIED,
}


_MOST_KEPT = 100


def with_calls(error: EpisodeFailed, run_dir: Path, episode_id: str, calls: CallLog) -> EpisodeFailed:
    """Writes the calls of an agent that failed to a file, if the run has few of these. The error then names it."""
    folder = run_dir / "failed_episodes"
    is_of_others = error.failure in (EnvironmentFailure.LOST, EnvironmentFailure.NEIGHBOR)
    if is_of_others or not calls.calls or (folder.is_dir() and len(os.listdir(folder)) >= _MOST_KEPT):
        return error
    path = folder / f"{episode_id.replace('/', '-')}.jsonl"
    lines = [{"episode": episode_id, "failure": error.failure, "detail": error.detail}, *calls.lines()]
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines))
    return EpisodeFailed(error.failure, f"{error.detail}: its calls are in {path}", alone=error.alone)


@dataclass(frozen=True)
class Played:
    """An episode that was played or, with a `failure`, that could not be."""

    prompt: Prompt
    completion: Completion
    episode: Episode
    failure: EpisodeFailed | None = None
    routed_experts: bytes = b""
    sampling_mask: bytes = b""
    segments: Sequence[Row] = ()
    """The rows of an agent's episode; without an agent, the completion is the only one."""
    left: Left | None = None


def _is_of_others(failure: EnvironmentFailure, number: int, *, alone: bool) -> bool:
    """Returns whether other episodes or a restart of the service may be why an episode failed so for the nth time."""
    if failure is EnvironmentFailure.LOST:
        return number <= _MOST_LOST
    return failure is EnvironmentFailure.NEIGHBOR and not alone


class PlayedCollector(Collector):
    """Collects groups whose samples are episodes. Each episode advances on its own."""

    def __init__(
        self, rollout: Rollout, rewards: Rewards, tokenizer: Tokenizer, config: Config, environments: Environments
    ):
        super().__init__(rollout, rewards, tokenizer, config.seed)
        assert config.environment, "make_collector has checked"
        self._retries, self._on_failure = config.environment.max_retries, config.environment.on_failure
        self._environments = environments
        self._counts: Counter[str] = Counter()
        self._set_aside: set[str] = set()
        self._dangerous: dict[str, set[int]] = {}  # prompt id -> samples that hung or ended their worker

    async def _attempt(
        self, episode_id: str, prompt: Prompt, request: PromptRequest, sample: int, *, alone: bool
    ) -> Played:
        """Plays one episode once, `alone` in a worker process of its own. Raises EpisodeFailed."""
        raise NotImplementedError

    def _group(self, index: int, prompt: Prompt, played: Sequence[Played], request: PromptRequest) -> SampledGroup:
        raise NotImplementedError

    async def one(self, index: int, prompt: Prompt, request: PromptRequest) -> ScoredGroup | None:
        """Plays and scores the episodes of one prompt. Returns None if a failure drops the group."""
        with within(group=prompt.prompt_id), span("group", group=prompt.prompt_id, samples=request.num_samples):
            try:
                played = await gather(self._play(prompt, request, sample) for sample in range(request.num_samples))
            except EpisodeFailed as error:  # the request keeps no failed episode, and the others are no whole group
                if self._on_failure == "fail" and error.failure is not EnvironmentFailure.OVERLONG:
                    raise
                return None
            judged = [one for one in played if one.failure is None]  # the others have no answer to judge
            group = self._group(index, prompt, judged, request) if judged else None
            keep_failed = request.keep_failed
            scored = await self._rewards.score(group, self._tokenizer, keep_failed=keep_failed) if group else None
            if group and scored is None:
                return None
        scores, scorer = (iter(scored.scores), scored.scorer) if scored else (iter(()), self._rewards.opened.scorer)
        whole = group if len(judged) == len(played) else self._group(index, prompt, played, request)
        return ScoredGroup(**vars(whole), scores=[self._total(one, scores) for one in played], scorer=scorer)

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

    async def _play(self, prompt: Prompt, request: PromptRequest, sample: int) -> Played:
        """Plays one episode; again, with the same seeds, if the environment fails.

        An episode that hurts the others of its worker is played again alone, and so are all of its prompt until it ends
        well. What may be the fault of others does not count as a retry.

        Raises:
            EpisodeFailed: The environment still fails, and the request keeps no failed episodes.
        """
        num_left, alone = self._retries + 1, prompt.prompt_id in self._dangerous
        failed = Counter[EnvironmentFailure]()
        while True:
            try:
                episode_id = f"{prompt.prompt_id}/{sample}/{uuid.uuid4().hex}"
                played = await self._attempt(episode_id, prompt, request, sample, alone=alone)
                dangerous = self._dangerous.get(prompt.prompt_id, set())
                dangerous.discard(sample)
                if not dangerous:
                    self._dangerous.pop(prompt.prompt_id, None)
                return played
            except EpisodeFailed as error:
                failure, where = error, f"prompt {prompt.prompt_id} sample {sample}"
                self._counts[f"failed_{error.failure}"] += 1
                failed[error.failure] += 1
                is_its_own = alone or not error.alone  # in a worker of its own, every failure is its own
                if is_its_own and not _is_of_others(error.failure, failed[error.failure], alone=alone):
                    num_left -= 1
                if alone and error.failure is EnvironmentFailure.TIMEOUT:  # it would hang each time
                    num_left = 0
                    self._set_aside.add(prompt.prompt_id)
                    detail = f"hangs again, alone in a worker: {where}: {error.detail}"
                    failure = EpisodeFailed(EnvironmentFailure.SET_ASIDE, detail)
                self.failure_log.add(Cause(ENVIRONMENT, failure.failure, failure.detail), where)
                if error.alone:
                    self._dangerous.setdefault(prompt.prompt_id, set()).add(sample)
                alone = (
                    alone or failed[EnvironmentFailure.NEIGHBOR] >= _MOST_HURT or prompt.prompt_id in self._dangerous
                )
            if num_left <= 0 or failure.failure is EnvironmentFailure.OVERLONG:
                break
        if not request.keep_failed:
            raise failure
        return Played(
            prompt,
            Completion(finish_reason=FinishReason.FINISH_REASON_STOP),
            Episode((), (), (), environment=""),
            failure,
        )

    def turn_seed(self, prompt: Prompt, request: PromptRequest, sample: int, turn: int) -> int:
        """Returns the seed of a turn; that of the first is the seed of a single completion."""
        return seed_of(self._seed, request.step, prompt.prompt_id, sample, *([turn] if turn else []))

    def _total(self, played: Played, scores: Iterator[Score]) -> Score:
        """Returns the next score with the environment's reward, if it gives any; a failure has no reward at all."""
        if played.failure:
            reason = _SCORE_REASONS.get(played.failure.failure, FailureReason.FAILURE_REASON_ERROR)
            return Score(failure=Failure(reason=reason, scorer=ENVIRONMENT, message=played.failure.message))
        score = next(scores)
        if played.left or score.HasField("failure"):
            return score
        components = {**score.components, ENVIRONMENT: played.episode.reward}
        return Score(reward=total([score.reward, *played.episode.turn_rewards]), components=components)


def require_stamp(turn_of: SampledGroup, request: PromptRequest, sample: int, turn: int) -> None:
    """Checks that a turn comes from the stamp that its whole sample will carry to the trainer."""
    if turn_of.stamp != request.stamp:
        raise PreconditionFailed(
            f"prompt {turn_of.prompt.prompt_id} sample {sample}: turn {turn} was sampled from version "
            f"{turn_of.stamp.version} ({turn_of.stamp.digest[:8]}), and not from version {request.stamp.version} "
            f"({request.stamp.digest[:8]}) like the others; see the log of the replica",
            reason=Reason.STALE_STAMP,
        )
