"""Implements `lockstep config`, which lists keys: as paragraphs in a terminal, or as one line per key in a pipe."""

import difflib
from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from services.common.config.reading.load import Key
from services.common.errors import InvalidInput


def keys_with_prefix(prefix: str, found: Sequence[Key]) -> list[Key]:
    """Returns the keys of `found` whose path starts with `prefix`.

    Raises:
        InvalidInput: No key does; the message names the nearest section or key.
    """
    if chosen := [key for key in found if key.path.startswith(prefix)]:
        return chosen
    paths = _paths(found)
    names = {path.rpartition(".")[2]: path for path in reversed(paths)} | {path: path for path in paths}
    close = difflib.get_close_matches(prefix, names, n=1)
    advice = f"did you mean {names[close[0]]}?" if close else "`lockstep config` lists every key"
    raise InvalidInput(f"no key begins with {prefix}; {advice}", field="prefix")


def show_keys(found: Sequence[Key], console: Console) -> None:
    """Prints a paragraph per key; if `console` is not a terminal, a line with tabs of key, type, default and help."""
    for key in found:
        if console.is_terminal:
            console.print(Text.assemble((key.path, "bold"), f" = {key.default}"))
            console.print(Padding(Text.assemble((key.type, "dim"), f"\n{key.help}"), (0, 0, 0, 4), expand=False))
        else:
            console.file.write("\t".join((key.path, key.type, key.default, key.help)) + "\n")


def _paths(found: Sequence[Key]) -> list[str]:
    """Returns the paths of all keys and of the sections that contain them."""
    parts = [key.path.split(".") for key in found]
    return [".".join(path[:end]) for path in parts for end in range(1, len(path) + 1)]
