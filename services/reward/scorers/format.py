"""A regular expression that the whole completion must match."""

from services.common.config.reward.section import FormatConfig, RewardConfig
from services.reward.scorers.worker import WorkerScorer


class FormatScorer(WorkerScorer):
    """1 if it matches, else 0. In a worker, because a pattern can take exponential time on some texts."""

    version = "1"

    def __init__(self, config: FormatConfig, run: RewardConfig):
        super().__init__("services.reward.graders.format:grade", {"pattern": config.pattern}, run)
