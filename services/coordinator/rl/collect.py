"""Prompts in, scored groups out: each group is scored while the others still generate."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.types.v1.types_pb2 import PolicyStamp, SamplingParams

from services.common.config.rollout import SamplingConfig
from services.common.errors import LockstepError, Reason
from services.common.tasks import gather
from services.common.telemetry.context import within
from services.common.telemetry.trace import span
from services.coordinator.data.groups import ScoredGroup
from services.coordinator.data.prompts import Prompt
from services.coordinator.data.tokenizer import Tokenizer
from services.coordinator.services.clients.reward import Reward
from services.coordinator.services.clients.rollout import Rollout


@dataclass(frozen=True)
class Draw:
    """What is drawn of a prompt, and from which weights."""

    num_samples: int
    sampling: SamplingConfig
    stamp: PolicyStamp
    step: int
    """Seeds follow from it: the version of the stamp, unless more than one batch is drawn from that."""
    with_baseline: bool = False
    """Also one greedy completion, of which only the reward is kept."""
    keep_failed: bool = False
    """No group is dropped: the reward of a sample that could not be scored is 0."""


class Collector:
    """Samples and scores prompts with one tokenizer; the seeds follow from the run's."""

    def __init__(self, rollout: Rollout, reward: Reward, tokenizer: Tokenizer, seed: int):
        self._rollout, self._reward, self._tokenizer, self._seed = rollout, reward, tokenizer, seed

    async def collect(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: SamplingConfig, stamp: PolicyStamp
    ) -> list[ScoredGroup]:
        """`num_samples` completions of every prompt, in the order of the prompts; none is dropped.

        Raises:
            LockstepError: REWARD_FAILED if no sample could be scored.
        """
        draw = Draw(num_samples, sampling, stamp, stamp.version, keep_failed=True)
        drawn = await gather(self.one(i, p, draw) for i, p in enumerate(prompts))
        groups = [group for group in drawn if group is not None]
        assert len(groups) == len(prompts), "keep_failed keeps every group"
        if all(group.is_failed.all() for group in groups):
            raise LockstepError("no sample could be scored; see the log", reason=Reason.REWARD_FAILED)
        return groups

    async def one(self, index: int, prompt: Prompt, draw: Draw) -> ScoredGroup | None:
        """One prompt, sampled and scored; None if `reward.on_failure` drops it."""
        if not draw.with_baseline:
            return await self._one(index, prompt, draw)
        greedy = replace(draw, num_samples=1, sampling=draw.sampling.model_copy(update={"temperature": 0.0}))
        group, baseline = await gather(self._one(index, prompt, drawn) for drawn in (draw, greedy))
        return replace(group, baseline=float(baseline.rewards[0])) if group and baseline else None

    async def _one(self, index: int, prompt: Prompt, draw: Draw) -> ScoredGroup | None:
        params = SamplingParams(
            temperature=draw.sampling.temperature,
            max_tokens=draw.sampling.max_tokens,
            stop_token_ids=self._tokenizer.eos_token_ids,
        )
        seeds = [self._seed_of(draw.step, prompt.prompt_id, sample) for sample in range(draw.num_samples)]
        with within(group=prompt.prompt_id), span("group", group=prompt.prompt_id, samples=draw.num_samples):
            group = await self._rollout.generate(index, prompt, seeds, params, draw.stamp)
            return await self._reward.score(group, self._tokenizer, keep_failed=draw.keep_failed)

    def _seed_of(self, step: int, prompt_id: str, sample: int) -> int:
        """The same for the same (run seed, step, prompt, sample), wherever and whenever it is drawn."""
        key = f"{self._seed}/{step}/{prompt_id}/{sample}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
