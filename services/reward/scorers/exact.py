"""Scores completions that equal the answer."""

import unicodedata

from services.common.config.reward.section import ExactConfig, RewardConfig
from services.reward.scorers.base import Item, Scorer


class ExactScorer(Scorer):
    """Scores 1 if completion and answer are equal after stripping whitespace, else 0."""

    version = "2"

    def __init__(self, config: ExactConfig, run: RewardConfig):
        self._ignore_case = config.ignore_case

    async def score(self, item: Item) -> float:
        """Returns 1.0 or 0.0."""
        completion, answer = (unicodedata.normalize("NFC", text).strip() for text in (item.completion, item.answer))
        if self._ignore_case:
            completion, answer = (unicodedata.normalize("NFC", text.casefold()) for text in (completion, answer))
        return float(completion == answer)
