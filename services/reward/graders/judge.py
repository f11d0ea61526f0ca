"""The score in a judge's answer."""

import re

from services.reward.scorers.base import FailureReason, ScoringError


def extract(*, text: str, pattern: str, scale: float) -> float:
    """The first group of the last match of `pattern` in `text`, as a number, times `scale`. `.` matches line breaks.

    The last, because a judge thinks and quotes before it says what it found.

    Raises:
        ScoringError: ERROR, if nothing matches or the group is no number.
    """
    found = None
    for match in re.finditer(pattern, text, re.DOTALL):
        found = match
    if found is None:
        raise ScoringError(FailureReason.ERROR, f"score_pattern does not match the judge's answer {text[-200:]!r}")
    try:
        return float(found[1]) * scale
    except (TypeError, ValueError):
        raise ScoringError(FailureReason.ERROR, f"the judge's score {found[1]!r} is not a number") from None
