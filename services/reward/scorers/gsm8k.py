"""Compares final numbers as in GSM8K (arXiv 2110.14168), where `#### 1,234` ends a solution."""

import re
from decimal import Decimal

from services.common.config.reward.section import Gsm8kConfig, RewardConfig
from services.reward.graders.completion import after_reasoning
from services.reward.graders.texts import one_width
from services.reward.scorers.base import FailureReason, Item, Scorer, ScoringError

# A minus is a sign only if it cannot be part of a difference (5-3) or a range (3-5).
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)])[-−])?\$?(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)

_MARKER = re.compile(r"(?<!#)####(?!#)")
_SPACES = re.compile(r"\\[!,;: ](?=[0-9]{3})")
_STEP = re.compile(r"\W*[0-9]+[.):]\s+[^\W\d]")
_BEGINS = re.compile(r"(?:\\[a-z]+\{|[^\w\n]|[A-Z]{3}\s)*[0-9]")
_SAYS = re.compile(r"\b(?:answer|result|total)\b(?:\s+is)?\s*[:=]?[^\w\n]*[0-9]", re.IGNORECASE)


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

    version = "2"

    def __init__(self, config: Gsm8kConfig, run: RewardConfig):
        self._require_marker = config.require_marker

    async def score(self, item: Item) -> float:
        """Returns 1.0 or 0.0.

        Raises:
            ScoringError: The answer has no number.
        """
        gold, _ = _final_number(item.answer)
        if gold is None:
            raise ScoringError(FailureReason.INVALID_ANSWER, f"no number in the answer {item.answer[-100:]!r}")
        found, is_marked = _final_number(after_reasoning(item.completion))
        return float((is_marked or not self._require_marker) and found == gold)


def _final_number(text: str) -> tuple[Decimal | None, bool]:
    """Returns the first number after the last marker, on its line, else the last number; and whether a marker gave it.

    A last line of `####` without a number gives none.
    """
    text = _SPACES.sub("", one_width(text).replace("{,}", ",")).rstrip()
    for marker in reversed(list(_MARKER.finditer(text))):
        line, more, _ = text[marker.end() :].partition("\n")
        if not more or not _is_heading(line):
            found = _NUMBER.search(line)
            return (last_number(found[0]) if found else None), True
    return last_number(text), False


def _is_heading(line: str) -> bool:
    """Returns whether the line after `####`, which is not the last, is a heading of Markdown, and no answer.

    An answer begins with its number or says that it is one. A number that counts steps has a point and words behind it.
    """
    return bool(_STEP.match(line)) or not (_BEGINS.match(line) or _SAYS.search(line))
