"""Implements the tool of deploy/runs/lookup.yaml: a table that the policy cannot see."""

import random

_draw = random.Random(0)
TABLE = {f"{key:03d}": f"{_draw.randrange(100):02d}" for key in range(1000)}
"""Maps every key of three digits to a value of two."""


def lookup(key: str) -> str:
    """Looks up the value of a key.

    Args:
        key: Three digits.

    Raises:
        ValueError: There is no such key.
    """
    if key not in TABLE:
        raise ValueError("no such key")
    return TABLE[key]
