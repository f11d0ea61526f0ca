"""A reward model, in a worker process of its own: this process imports no torch."""

from collections.abc import Sequence

from services.common.config.reward.model import ModelConfig
from services.common.config.reward.section import RewardConfig
from services.reward.pool import Target, WorkerPool
from services.reward.scorers.base import Item, Scorer, ScoringError
from services.reward.scorers.worker import columns

LOAD_FIELDS = {"path", "label", "template", "device", "dtype", "batch_size", "max_tokens"}
"""Of the config, what the worker's `load` takes."""


class ModelScorer(Scorer):
    """The logit of a sequence-classification model for prompt and completion. See services/reward/graders/model.py."""

    def __init__(self, config: ModelConfig, run: RewardConfig):
        self._pool = WorkerPool(
            Target(
                "services.reward.graders.model:load",
                init=config.model_dump(include=LOAD_FIELDS),
                start_timeout_s=config.start_timeout_s,
            ),
            num_workers=1,
            timeout_s=config.timeout_s,
        )

    async def open(self) -> None:
        """Loads the model; the version is the hash of its files and of what chooses the score.

        Raises:
            ScoringError: It cannot be loaded.
        """
        await self._pool.open()
        self.version = self._pool.source_digest

    async def score_group(self, items: Sequence[Item]) -> list[float | ScoringError]:
        """One call for the group."""
        return await self._pool.call_group(columns(items), len(items))

    async def close(self) -> None:
        """Kills the worker."""
        await self._pool.close()
