"""Prompts in, scored groups out: each group is scored while the others still generate."""

import hashlib
from collections.abc import Sequence

from lockstep.types.v1.types_pb2 import PolicyStamp, SamplingParams

from services.common.config.rollout import SamplingConfig
from services.common.errors import LockstepError, Reason
from services.common.tasks import gather
from services.coordinator.clients.reward import Reward
from services.coordinator.clients.rollout import Rollout
from services.coordinator.data.prompts import Prompt
from services.coordinator.data.tokenizer import Tokenizer
from services.coordinator.groups import ScoredGroup


class Collector:
    """Samples and scores prompts with one tokenizer; the seeds follow from the run's."""

    def __init__(self, rollout: Rollout, reward: Reward, tokenizer: Tokenizer, seed: int):
        self._rollout, self._reward, self._tokenizer, self._seed = rollout, reward, tokenizer, seed

    async def collect(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: SamplingConfig, stamp: PolicyStamp
    ) -> list[ScoredGroup]:
        """`num_samples` completions of every prompt, in the order of the prompts, less the groups that were dropped.

        Raises:
            LockstepError: REWARD_FAILED if no group could be scored.
        """
        params = SamplingParams(
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            stop_token_ids=self._tokenizer.eos_token_ids,
        )

        async def one(index: int, prompt: Prompt) -> ScoredGroup | None:
            seeds = [self._seed_of(stamp.version, prompt.prompt_id, sample) for sample in range(num_samples)]
            group = await self._rollout.generate(index, prompt, seeds, params, stamp)
            return await self._reward.score(group, self._tokenizer)

        groups = [group for group in await gather(one(i, p) for i, p in enumerate(prompts)) if group]
        if not groups:
            raise LockstepError("no prompt group could be scored", reason=Reason.REWARD_FAILED)
        return groups

    def _seed_of(self, version: int, prompt_id: str, sample: int) -> int:
        """The same for the same (run seed, step, prompt, sample), wherever and whenever it is drawn."""
        key = f"{self._seed}/{version}/{prompt_id}/{sample}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
