"""Scores completions that equal the answer."""

from services.common.config.reward.section import ExactConfig, RewardConfig
from services.reward.scorers.base import Item, Scorer


class ExactScorer(Scorer):
    """Scores 1 if completion and answer are equal after stripping whitespace, else 0."""

    version = "1"

    def __init__(self, config: ExactConfig, run: RewardConfig):
        self._ignore_case = config.ignore_case

    async def score(self, item: Item) -> float:
        """Returns 1.0 or 0.0."""
        completion, answer = item.completion.strip(), item.answer.strip()
        if self._ignore_case:
            completion, answer = completion.casefold(), answer.casefold()
        return float(completion == answer)
