"""Makes the consoles of all commands, and fits tables to them."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from rich.console import Console

from services.common.telemetry.trace import inert


class _Inert(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        """Prints texts without characters that would control the terminal: errors quote files and models."""
        super().print(*(inert(one) if isinstance(one, str) else one for one in objects), **options)


literal_console = partial(_Inert, markup=False, emoji=False)
"""Returns a console that prints texts as they are; further options are those of Rich's Console.

Names and messages may contain `[level=1]` or `:key:`, which Rich would read as markup and as an emoji.
"""


def is_live(console: Console) -> bool:
    """Returns whether lines can be redrawn: a file cannot, nor a terminal that has no cursor to move (TERM=dumb)."""
    return console.is_terminal and not console.is_dumb_terminal


def fitting(lines: Sequence[Sequence[str]], by_importance: Iterable[int], width: int) -> list[int]:
    """Returns the ascending indices of the columns of `lines` (including the header) that fit in `width` characters.

    The most important column is always included.
    """
    left, shown = width - 1, list[int]()  # the table's own border takes a character
    for index in by_importance:
        column = max(len(line[index]) for line in lines) + 3  # padding and border
        if column <= left or not shown:
            left -= column
            shown.append(index)
    return sorted(shown)
