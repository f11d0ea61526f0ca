"""Finds the numbers that a rule of divisibility allows."""


def nearest_multiples(count: int, divisor: int) -> str:
    """Returns the positive multiples of `divisor` next to `count`, which is none, as text."""
    below = count // divisor * divisor
    return f"{below} or {below + divisor}" if below else str(divisor)
