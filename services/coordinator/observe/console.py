"""Makes the consoles of all commands, and fits tables to them."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from services.common.telemetry import inert


class _Inert(Console):
    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Shows no character of a text or a table that would control the terminal: they quote files and models."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else inert(text), style, control)


literal_console = partial(_Inert, markup=False, emoji=False)
"""Returns a console that prints texts as they are; further options are those of Rich's Console.

Names and messages may contain `[level=1]` or `:key:`, which Rich would read as markup and as an emoji.
"""


def is_live(console: Console) -> bool:
    """Returns whether lines can be redrawn: a file cannot, nor a terminal that has no cursor to move (TERM=dumb)."""
    return console.is_terminal and not console.is_dumb_terminal


def shortened(text: str, most: int) -> str:
    """Returns a text, or its beginning and an ellipsis, in at most `most` characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


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
