"""Penalizes long samples."""

from services.common.config.reward.section import LengthConfig, RewardConfig
from services.reward.scorers.base import Item, Scorer


class LengthScorer(Scorer):
    """Scores 0 up to target_tokens and -1 from max_tokens on: DAPO's soft overlong punishment (2503.14476, eq. 13)."""

    version = "1"

    def __init__(self, config: LengthConfig, run: RewardConfig):
        self._target_tokens = config.target_tokens
        self._max_tokens = config.max_tokens

    async def score(self, item: Item) -> float:
        """Returns a score from -1.0 to 0.0."""
        over = (item.num_tokens - self._target_tokens) / (self._max_tokens - self._target_tokens)
        return -min(max(over, 0.0), 1.0)
