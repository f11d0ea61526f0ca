"""Compares mathematical answers with math-verify (sympy), in worker processes."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version

from services.common.config.reward.section import MathConfig, RewardConfig
from services.reward.scorers.base import FailureReason, Item, ScoringError, expected, share_s
from services.reward.scorers.worker import WorkerScorer


class MathScorer(WorkerScorer):
    """Scores 1 if the last boxed answer equals the dataset's, else 0. See services/reward/graders/math.py.

    An answer such as 9^{9^9}, on which sympy does not end or takes all memory, is wrong.
    """

    version = f"3/math-verify-{version('math-verify')}"
    num_spares, num_tries = 1, 1  # score_group tries again

    def __init__(self, config: MathConfig, run: RewardConfig):
        super().__init__("services.reward.graders.math:grade", {"require_boxed": config.require_boxed}, run)
        self._num_workers, self._group_timeout_s = run.num_workers, run.group_timeout_s

    async def score_group(self, items: Sequence[Item]) -> list[float | ScoringError]:
        """Scores each item. Time that an item waits for others does not count against its limit."""
        limit_s = share_s(self._group_timeout_s, num_samples=len(items), num_slots=self._num_workers)
        results = await self._grade_all(items, limit_s)
        bombs = [index for index, result in enumerate(results) if self._is_bomb(result)]
        if not bombs:
            return results
        without = replace(items[0], completion="")  # takes as long only if the dataset's answer is at fault
        (gold,) = await self._grade_all([without], limit_s)
        # Something else may have killed a worker; a text that kills two of them is at fault.
        crashed = [index for index in bombs if self._is_bomb(results[index], FailureReason.CRASHED)]
        again = await self._grade_all([items[index] for index in crashed], limit_s)
        results = dict(enumerate(results)) | dict(zip(crashed, again, strict=True))
        zero = gold if isinstance(gold, ScoringError) else 0.0
        return [zero if self._is_bomb(results[index]) else results[index] for index in range(len(items))]

    async def _grade_all(self, items: Sequence[Item], limit_s: float) -> list[float | ScoringError]:
        calls = (self._pool.call({**asdict(item), **self._kwargs}, limit_s) for item in items)
        return expected(await asyncio.gather(*calls, return_exceptions=True))

    def _is_bomb(self, result: float | ScoringError, *reasons: FailureReason) -> bool:
        """Returns whether the text may have taken all time or memory of a worker."""
        reasons = reasons or (FailureReason.TIMEOUT, FailureReason.CRASHED)
        return isinstance(result, ScoringError) and result.reason in reasons and not self._pool.closed
