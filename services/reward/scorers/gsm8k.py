"""Compares final numbers as in GSM8K (arXiv 2110.14168), where `#### 1,234` ends a solution."""

import re
from decimal import Decimal

from services.common.config.reward.section import Gsm8kConfig, RewardConfig
from services.reward.scorers.base import FailureReason, Item, Scorer, ScoringError

# A minus is a sign only if it cannot be part of a difference (5-3) or a range (3-5).
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)])[-−])?\$?(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)


def last_number(text: str) -> Decimal | None:
    """Returns the last number in `text`, which may have thousands separators, a currency sign and a minus."""
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return None
    last = numbers[-1]
    number = Decimal(last["digits"].replace(",", ""))
    return -number if last["sign"] else number


class Gsm8kScorer(Scorer):
    """Scores 1 if the final numbers are equal, else 0. The answer may be a bare number or a whole GSM8K solution."""

    version = "1"

    def __init__(self, config: Gsm8kConfig, run: RewardConfig):
        self._require_marker = config.require_marker

    async def score(self, item: Item) -> float:
        """Returns 1.0 or 0.0.

        Raises:
            ScoringError: The answer has no number.
        """
        gold = _marked_number(item.answer) if "####" in item.answer else last_number(item.answer)
        if gold is None:
            raise ScoringError(FailureReason.INVALID_ANSWER, f"no number in the answer {item.answer[-100:]!r}")
        if "####" in item.completion:
            return float(_marked_number(item.completion) == gold)
        return float(not self._require_marker and last_number(item.completion) == gold)


def _marked_number(text: str) -> Decimal | None:
    """Returns the first number after the last ####, on the same line."""
    found = _NUMBER.search(text.rpartition("####")[2].strip().split("\n", 1)[0])
    return last_number(found[0]) if found else None
