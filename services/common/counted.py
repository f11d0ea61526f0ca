"""Writes a number with its noun."""


def counted(number: int, noun: str) -> str:
    """Returns `1 step` or `2 steps`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
