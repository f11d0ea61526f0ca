"""Matches regular expressions against model text."""

import re


def grade(*, completion: str, pattern: str, **_: object) -> float:
    """Returns 1.0 if `pattern` matches the whole `completion`, else 0.0. `.` matches line breaks too."""
    return float(re.fullmatch(pattern, completion, re.DOTALL) is not None)
