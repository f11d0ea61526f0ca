"""Compares mathematical answers with math-verify (sympy), in worker processes."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version

from services.common.config.reward.section import MathConfig, RewardConfig
from services.common.tasks import gather
from services.reward.scorers.base import FailureReason, Item, ScoringError, score_or_error, share_s
from services.reward.scorers.worker import WorkerScorer


class MathScorer(WorkerScorer):
    """Scores 1 if the last boxed answer equals the dataset's, else 0. See services/reward/graders/math.py.

    An answer such as 9^{9^9}, on which sympy does not end or takes all memory, is wrong.
    """

    version = f"2/math-verify-{version('math-verify')}"
    num_spares = 1

    def __init__(self, config: MathConfig, run: RewardConfig):
        super().__init__("services.reward.graders.math:grade", {"require_boxed": config.require_boxed}, run)
        self._num_workers, self._group_timeout_s = run.num_workers, run.group_timeout_s

    async def score_group(self, items: Sequence[Item]) -> list[float | ScoringError]:
        """Scores each item. The time that one waits for others does not count for it."""
        limit_s = share_s(self._group_timeout_s, num_samples=len(items), num_slots=self._num_workers)
        return await gather(score_or_error(self._score(item, limit_s)) for item in items)

    async def _score(self, item: Item, limit_s: float) -> float:
        try:
            return await self._grade(item, limit_s)
        except ScoringError as error:
            if not self._is_bomb(error):
                raise
            failure = error
        await self._grade(replace(item, completion=""), limit_s)  # raises if it is the dataset's answer that takes long
        if failure.reason is FailureReason.TIMEOUT:
            return 0.0
        # Something else may have killed the worker. A text that kills two of them is at fault.
        try:
            return await self._grade(item, limit_s)
        except ScoringError as error:
            if not self._is_bomb(error):
                raise
            return 0.0

    def _is_bomb(self, error: ScoringError) -> bool:
        """Whether the text may have taken all time or memory of a worker."""
        return error.reason in (FailureReason.TIMEOUT, FailureReason.CRASHED) and not self._pool.closed

    async def _grade(self, item: Item, limit_s: float) -> float:
        return await self._pool.call({**asdict(item), **self._kwargs}, limit_s)
