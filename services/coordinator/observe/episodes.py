"""Shows one sample of a recent step as a conversation, in a few lines."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from services.coordinator.data.groups import Conversation, Part
from services.coordinator.runs.record import batch_path
from services.coordinator.runs.reporter import Reporter

_MAX_CHARS = 2000
"""Number of characters of a text that are kept; a terminal shows fewer."""
_LINES = 2
"""Lines that one text takes at most."""


class LastSample(Reporter):
    """Reads the first sample of the batch of every `freq`-th finished step, and gives it to `shown`."""

    def __init__(self, run_dir: Path, decode: Callable[[Sequence[int]], str], shown: Reporter, freq: int = 1):
        self._run_dir, self._decode, self._shown, self._freq = run_dir, decode, shown, freq

    def step(self, version: int, metrics: dict[str, float]) -> None:
        if version % self._freq or not self._shown.shows_samples:
            return
        path = batch_path(self._run_dir, version - 1)
        try:
            with pq.ParquetFile(path) as file:
                (row,) = next(file.iter_batches(batch_size=1)).to_pylist()
        except pa.ArrowInvalid as error:  # it is a ValueError, but it means that the disk has lost data
            raise OSError(f"{path} is damaged: {error}") from error
        self._shown.conversation(version, Conversation.of_any(row, self._text))

    def _text(self, tokens: Sequence[int]) -> str:
        text = self._decode(tokens)
        return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]} …"


def show_conversation(conversation: Conversation, title: str, width: int, height: int) -> RenderableType:
    """Returns the conversation in at most `height` lines of `width`, with the middle cut out if it is longer."""
    room = max(1, (height - 2) // _LINES)
    head = Text(f"{title}, prompt {conversation.prompt_id}, sample {conversation.sample}: ", overflow="ellipsis")
    head.append(f"reward {conversation.reward:.3f}, {conversation.finish_reason}", style="bold")
    head.no_wrap = True
    grid = Table.grid(padding=(0, 1))
    for justify in ("right", "left", "right"):
        grid.add_column(justify=justify, vertical="top")
    lines = [("prompt", conversation.prompt, "", "dim"), *_lines(conversation.parts)]
    left_out = len(lines) - room
    if left_out > 0:
        first = room // 2
        lines[first : first + left_out + 1] = [("", f"… {left_out + 1} more …", "", "dim")]
    most = _LINES * max(10, width - 24)
    for who, text, reward, style in lines:
        grid.add_row(Text(who, style=style), Text(_short(text, most), style=style), Text(reward, style="bold"))
    return Group(head, grid)


def _lines(parts: Sequence[Part]) -> list[tuple[str, str, str, str]]:
    lines, turn = [], 0
    for part in parts:
        if part.reward is None:
            lines.append(("reply", part.text, "", "dim"))
        else:
            turn += 1
            lines.append((f"turn {turn}" if len(parts) > 1 else "completion", part.text, f"{part.reward:+.3f}", "cyan"))
    return lines


def _short(text: str, most: int) -> str:
    """Returns the text on one line, with its middle cut out if it has more than `most` characters.

    A character that is not printable, and could therefore control the terminal, becomes U+FFFD.
    """
    text = "".join(character if character.isprintable() else "\ufffd" for character in " ".join(text.split()))
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[:half]} … {text[len(text) - half :]}"
