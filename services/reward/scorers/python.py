"""A function of the user's."""

from services.common.config.reward import PythonConfig, RewardConfig
from services.reward.scorers.worker import WorkerScorer


class PythonScorer(WorkerScorer):
    """Whatever the function returns. The path comes from the run's config, never from a sample."""

    def __init__(self, config: PythonConfig, run: RewardConfig):
        super().__init__(config.path, config.kwargs, run)

    async def open(self) -> None:
        """Starts the workers; the version is the hash of the source file that they loaded."""
        await super().open()
        self.version = self._pool.source_digest
