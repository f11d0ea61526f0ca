"""Makes the consoles of all commands."""

from typing import Any

from rich.console import Console


def literal_console(**options: Any) -> Console:
    """Returns a console that prints texts as they are; `options` are those of Rich's Console.

    Names and messages may contain `[level=1]` or `:key:`, which Rich would read as markup and as an emoji.
    """
    return Console(markup=False, emoji=False, **options)
