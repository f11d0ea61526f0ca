"""Scores with a reward model in a worker process of its own, so that the service imports no torch."""

from collections.abc import Sequence

from services.common.config.reward.model import ModelConfig
from services.common.config.reward.section import RewardConfig
from services.common.extras import missing_modules
from services.reward.processes.pool import Target, WorkerPool
from services.reward.scorers.base import FailureReason, Item, Scorer, ScoringError
from services.reward.scorers.worker import columns

LOAD_FIELDS = {"path", "label", "template", "device", "dtype", "batch_size", "max_tokens"}
"""Config keys that are passed to the worker's `load`."""


class ModelScorer(Scorer):
    """Scores with a logit of a sequence-classification model. See services/reward/graders/model.py."""

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
        """Loads the model. The version is the hash of its files and of the settings that affect the score.

        Raises:
            ScoringError: The extra is not installed, or the model cannot be loaded.
        """
        if missing := missing_modules("reward-model"):
            detail = f"{', '.join(missing)} is missing: pip install 'lockstep-rl[reward-model]'"
            raise ScoringError(FailureReason.ERROR, detail)
        await self._pool.open()
        self.version = self._pool.source_digest

    async def score_group(self, items: Sequence[Item]) -> list[float | ScoringError]:
        """Scores the group with one call."""
        return await self._pool.call_group(columns(items), len(items))

    async def close(self) -> None:
        """Kills the worker."""
        await self._pool.close()
