"""Extracts the score from a judge's answer."""

import re

from services.reward.errors import FailureReason, ScoringError


def extract(*, text: str, pattern: str) -> float:
    """Returns the first group of the last match of `pattern` in `text`, as a number.

    The last match counts, because a judge reasons and quotes before it gives its verdict. `.` matches line breaks too.

    Raises:
        ScoringError: ERROR, if nothing matches or the group is not a number.
    """
    found = None
    for match in re.finditer(pattern, text, re.DOTALL):
        found = match
    if found is None:
        raise ScoringError(FailureReason.ERROR, f"score_pattern does not match the judge's answer {text[-200:]!r}")
    try:
        return float(found[1])
    except (TypeError, ValueError):
        raise ScoringError(FailureReason.ERROR, f"the judge's score {found[1]!r} is not a number") from None
