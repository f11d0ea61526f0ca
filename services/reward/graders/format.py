"""Regular expressions on model text."""

import re


def grade(*, completion: str, pattern: str, **_: object) -> float:
    """1.0 if `pattern` matches all of `completion`, else 0.0. `.` matches line breaks."""
    return float(re.fullmatch(pattern, completion, re.DOTALL) is not None)
