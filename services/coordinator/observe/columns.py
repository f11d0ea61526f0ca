"""Tables that are as wide as the terminal lets them be, without a cell that is cut."""

from collections.abc import Iterable, Sequence


def fitting(lines: Sequence[Sequence[str]], by_importance: Iterable[int], width: int) -> list[int]:
    """Indices, ascending, of the columns that a table of `lines`, the header among them, has room for in `width`.

    The most important one is always among them.
    """
    left, shown = width - 1, list[int]()
    for index in by_importance:
        column = max(len(line[index]) for line in lines) + 3  # padding and border
        if column <= left or not shown:
            left -= column
            shown.append(index)
    return sorted(shown)
