"""Scores completions that match a regular expression."""

from services.common.config.reward.section import FormatConfig, RewardConfig
from services.reward.scorers.worker import WorkerScorer


class FormatScorer(WorkerScorer):
    """Scores 1 if the whole completion matches, else 0. Uses workers, because matching can take exponential time."""

    version = "1"

    def __init__(self, config: FormatConfig, run: RewardConfig):
        super().__init__("services.reward.graders.format:grade", {"pattern": config.pattern}, run)
