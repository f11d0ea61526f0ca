"""Scores with the user's function."""

from collections.abc import Sequence

from services.common.config.reward import PythonConfig, RewardConfig
from services.reward.errors import ScoringError
from services.reward.scorers.base import Item
from services.reward.scorers.worker import WorkerScorer, columns


class PythonScorer(WorkerScorer):
    """Scores with the function's results. Its path comes from the run's config, never from a sample."""

    def __init__(self, config: PythonConfig, run: RewardConfig):
        super().__init__(config.path, config.kwargs, run, max_concurrent=config.max_concurrent)
        self._takes_groups = config.group

    async def open(self) -> None:
        """Starts the workers. The version is the hash of the source file that they loaded."""
        await super().open()
        self.version = self._pool.source_digest

    async def score_group(self, items: Sequence[Item]) -> list[float | ScoringError]:
        """Calls the function once for the group if the config says so, otherwise once per item."""
        if not self._takes_groups:
            return await super().score_group(items)
        return await self._pool.call_group({**columns(items), **self._kwargs}, len(items))
