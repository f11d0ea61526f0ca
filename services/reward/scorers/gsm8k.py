"""Same final number, as in GSM8K (arXiv 2110.14168): `#### 1,234` ends the solution."""

import re
from decimal import Decimal

from services.common.config.reward.section import Gsm8kConfig, RewardConfig
from services.reward.scorers.base import FailureReason, Item, Scorer, ScoringError

# A minus counts as a sign only where it cannot be a difference (5-3) or a range (3-5).
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)])[-−])?\$?(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)


def last_number(text: str) -> Decimal | None:
    """The last number of `text`, with thousands separators, a currency sign or a minus."""
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return None
    last = numbers[-1]
    number = Decimal(last["digits"].replace(",", ""))
    return -number if last["sign"] else number


class Gsm8kScorer(Scorer):
    """1 if the final numbers are equal, else 0. The answer may be the bare number or a whole GSM8K solution."""

    version = "1"

    def __init__(self, config: Gsm8kConfig, run: RewardConfig):
        self._require_marker = config.require_marker

    async def score(self, item: Item) -> float:
        """1.0 or 0.0.

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
    """The first number after the last ####, on its line."""
    found = _NUMBER.search(text.rpartition("####")[2].strip().split("\n", 1)[0])
    return last_number(found[0]) if found else None
