"""Tests how a number is written with its noun."""

from services.common.counted import counted


def test_one_is_singular() -> None:
    assert [counted(number, "step") for number in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
