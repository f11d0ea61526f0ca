"""Samples and scores prompts; each group is scored while others are still being generated."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from lockstep.rollout.v1.rollout_pb2 import Drafts
from lockstep.types.v1.types_pb2 import PolicyStamp, SamplingParams, TokenSequence

from services.common.config.rollout import SamplingConfig
from services.common.errors import LockstepError, Reason
from services.common.tasks import gather
from services.common.telemetry.context import within
from services.common.telemetry.trace import span
from services.coordinator.clients.reward import Rewards
from services.coordinator.clients.rollout import Rollout
from services.coordinator.data.groups import SampledGroup, ScoredGroup
from services.coordinator.data.order import seed_of
from services.coordinator.data.prompts import Prompt
from services.coordinator.text.tokenizer import Tokenizer, stop_tokens, token_sequences


def _draft_metrics(drafts: Drafts) -> dict[str, float]:
    if not drafts.num_drafts:
        return {}
    metrics = {
        "speculation/drafted_tokens": float(drafts.num_drafted),
        "speculation/accepted_tokens": float(drafts.num_accepted),
        "speculation/accepted_per_draft": drafts.num_accepted / drafts.num_drafts,
    }
    return metrics | ({"speculation/draft_s": drafts.seconds} if drafts.seconds else {})


@dataclass(frozen=True)
class PromptRequest:
    """How to sample one prompt, and from which weights."""

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
        groups = [group for group in results if group is not None]
        assert len(groups) == len(prompts), "keep_failed keeps every group"
        if all(group.is_failed.all() for group in groups):
            message = f"data.eval.{name}: none of {len(groups)} prompts has a sample with a reward: "
            raise LockstepError(f"{message}{self.failure_log.last}", reason=Reason.REWARD_FAILED)
        return groups

    async def one(self, index: int, prompt: Prompt, request: PromptRequest) -> ScoredGroup | None:
        """Samples and scores one prompt. Returns None if `reward.on_failure` drops the group."""
        params = self.params(request, request.sampling.max_tokens)
        seeds = [seed_of(self._seed, request.step, prompt.prompt_id, sample) for sample in range(request.num_samples)]
        with within(group=prompt.prompt_id), span("group", group=prompt.prompt_id, samples=request.num_samples):
            group = await self._rollout.generate(index, prompt, seeds, params, request.stamp)
            self._count_drafts(group, request)
            return await self._rewards.score(group, self._tokenizer, keep_failed=request.keep_failed)

    async def with_baseline(self, index: int, prompt: Prompt, request: PromptRequest) -> ScoredGroup | None:
        """Like `one`, with the reward of one greedy completion as the baseline."""
        greedy = replace(request, num_samples=1, sampling=request.sampling.model_copy(update={"temperature": 0.0}))
        group, baseline = await gather(self.one(index, prompt, each) for each in (request, greedy))
        return replace(group, baseline=float(baseline.rewards[0])) if group and baseline else None

    def take_metrics(self) -> dict[str, float]:
        drafts, self._drafts = self._drafts, Drafts()
        failed = {f"sampling/failed/{name}": number for name, number in self._rewards.take_failures().items()}
        return failed | _draft_metrics(drafts)

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
