"""Writes a number with its noun."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """Returns `1 step` or `2 steps`; `plural` is for nouns that take no s."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"
