"""Chooses the columns of a table that fit the terminal, so that no cell is cut off."""

from collections.abc import Iterable, Sequence


def fitting(lines: Sequence[Sequence[str]], by_importance: Iterable[int], width: int) -> list[int]:
    """Returns the ascending indices of the columns of `lines` (including the header) that fit in `width` characters.

    The most important column is always included.
    """
    left, shown = width - 1, list[int]()
    for index in by_importance:
        column = max(len(line[index]) for line in lines) + 3  # padding and border
        if column <= left or not shown:
            left -= column
            shown.append(index)
    return sorted(shown)
