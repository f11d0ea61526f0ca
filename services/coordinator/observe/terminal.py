"""Shows a run in the terminal: first what its services do, then a live table of the last steps, and below it one of
their samples as a conversation."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median

import pyarrow as pa
import pyarrow.parquet as pq
from lockstep.coordinator.v1 import coordinator_pb2 as pb
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from services.coordinator.data.groups import conversation_of
from services.coordinator.observe.console import fitting, is_live, shortened
from services.coordinator.runs.record import batch_path
from services.coordinator.runs.reporter import Reporter, in_order

_MAX_CHARS = 2000  # of a text that are kept; a terminal shows fewer
_LINES_PER_TEXT = 2


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
        self._shown.conversation(version, conversation_of(row, self._text))

    def _text(self, tokens: Sequence[int]) -> str:
        text = self._decode(tokens)
        return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]} …"


def show_conversation(conversation: pb.Conversation, title: str, width: int, height: int) -> RenderableType:
    """Returns the conversation in at most `height` lines of `width`, with the middle cut out if it is longer."""
    room = max(1, (height - 2) // _LINES_PER_TEXT)
    head = Text(f"{title}, prompt {conversation.prompt_id}, sample {conversation.sample}: ", overflow="ellipsis")
    head.append(f"reward {conversation.reward:.3f}, {conversation.finish_reason}", style="bold")
    head.no_wrap = True
    grid = Table.grid(padding=(0, 1))
    for justify in ("right", "left", "right"):
        grid.add_column(justify=justify, vertical="top")
    answer = [("answer", conversation.answer, "", "green")] if conversation.HasField("answer") else []
    lines = [("prompt", conversation.prompt, "", "dim"), *_lines(conversation.parts), *answer]
    left_out = len(lines) - room
    if left_out > 0:
        first = room // 2
        lines[first : first + left_out + 1] = [("", f"… {left_out + 1} more …", "", "dim")]
    most = _LINES_PER_TEXT * max(10, width - 24)
    for who, text, reward, style in lines:
        grid.add_row(Text(who, style=style), Text(_on_one_line(text, most), style=style), Text(reward, style="bold"))
    return Group(head, grid)


def _lines(parts: Sequence[pb.ConversationPart]) -> list[tuple[str, str, str, str]]:
    lines, turn = [], 0
    for part in parts:
        if not part.HasField("reward"):
            lines.append(("reply", part.text, "", "dim"))
        else:
            turn += 1
            lines.append((f"turn {turn}" if len(parts) > 1 else "completion", part.text, f"{part.reward:+.3f}", "cyan"))
    return lines


def _on_one_line(text: str, most: int) -> str:
    """Returns the text on one line, with its middle cut out if it has more than `most` characters.

    A character that is not printable, and could therefore control the terminal, becomes U+FFFD.
    """
    text = "".join(character if character.isprintable() else "\ufffd" for character in " ".join(text.split()))
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[:half]} … {text[len(text) - half :]}"


class StageLines(Reporter):
    """Shows what the services do until the first phase of a step: a live line for each stage, or a line at its end."""

    def __init__(self, console: Console):
        self._console, self._stages = console, Stages()
        shown = lambda: Text("\n".join(self._stages.lines()))  # noqa: E731
        self._live = Live(console=console, get_renderable=shown, refresh_per_second=4, transient=True)
        self._is_live = is_live(console)

    def stage(self, service: str, name: str, began_s: float, seconds: float | None = None) -> None:
        self._stages.note(service, name, began_s, seconds)
        if seconds is not None and seconds >= _MIN_STAGE_S:
            self._console.print(f"  {service}: {name}, {seconds:.1f} s", soft_wrap=True, highlight=False)
        if self._is_live and not self._live.is_started:
            self._live.start()

    def begin_phase(self, name: str, version: int) -> None:
        """Leaves the terminal to the table of the steps."""
        self.close()

    def close(self) -> None:
        self._is_live = False
        self._live.stop()


class Stages:
    def __init__(self) -> None:
        self._running: dict[tuple[str, str], float] = {}

    def note(self, service: str, name: str, began_s: float, seconds: float | None) -> None:
        """Notes a stage that has begun, or ended after `seconds`."""
        if seconds is None:
            self._running[service, name] = began_s
        else:
            self._running.pop((service, name), None)

    def lines(self) -> list[str]:
        now_s = time.monotonic()
        running = sorted(self._running.items(), key=lambda item: item[1])
        return [f"  {service}: {name}, {now_s - since:.0f} s" for (service, name), since in running]


_MIN_STAGE_S, _LONG_PHASE_S = 1.0, 5.0  # what takes less is not worth a line, or a number

_ROWS = 12
_EPISODE_LINES = 14
_MAX_NAME = 12
_FRAME = 6  # lines around the rows: borders, header and a caption of up to two lines


class Terminal(Reporter):
    """Shows a live table of the last steps, or prints a line per step where nothing can be redrawn."""

    def __init__(self, console: Console, num_steps: int):
        self._console, self._num_steps = console, num_steps
        self.shows_samples = self._is_live = is_live(console)
        self._rows: list[list[str]] = []
        self._step_s: deque[float] = deque(maxlen=_ROWS)
        self._phase, self._sets, self._phase_began_s = "", _NAMES[1], 0.0
        self._stages = Stages()
        self._episode: tuple[int, pb.Conversation] | None = None
        self._live = Live(console=console, get_renderable=self._shown, refresh_per_second=4, transient=False)

    def stage(self, service: str, name: str, began_s: float, seconds: float | None = None) -> None:
        self._stages.note(service, name, began_s, seconds)

    def begin_phase(self, name: str, version: int) -> None:
        if self._is_live and not self._live.is_started:
            self._live.start()
        self._phase, self._phase_began_s = name, time.monotonic()
        if version < self._num_steps:
            self._phase = f"step {version + 1} of {self._num_steps}: {name}{self._time_left(version)}"

    def step(self, version: int, metrics: dict[str, float]) -> None:
        row = [str(version), "", *(show(metrics) for show in _COLUMNS.values())]
        if not self._is_live:
            self._print_line(row)
        self._rows = [*self._rows[1 - _ROWS :], row]
        self._step_s.append(metrics["time/step_s"])

    def _print_line(self, row: Sequence[str]) -> None:
        """Prints a line of a step, after the names if it is the first; held-out rewards have lines of their own."""
        cells = [f"{row[0]:>{len(str(self._num_steps))}}/{self._num_steps}", *row[1:]]
        shown = [index for index in range(len(row)) if row[index] or index not in (_HELD_OUT, _TEACHER)]
        widths = [max(_MIN_WIDTH, len(_NAMES[index]), len(cells[index])) for index in shown]
        for texts, style in ((_NAMES, "bold"), (cells, ""))[bool(self._rows) :]:
            line = "  ".join(f"{texts[index]:>{width}}" for index, width in zip(shown, widths, strict=True))
            self._console.print(line, style=style, soft_wrap=True)

    def conversation(self, version: int, conversation: pb.Conversation) -> None:
        self._episode = version, conversation

    def evaluation(self, version: int, metrics: dict[str, float]) -> None:
        ordered = {name: value for name, value in in_order(metrics).items() if name.endswith("/reward")}
        rewards = {name.removeprefix("eval/").removesuffix("/reward"): value for name, value in ordered.items()}
        if self._rows:
            short = {shortened(name, _MAX_NAME): f"{value:.3f}" for name, value in rewards.items()}
            self._sets = " ".join(f"{name:>{len(value)}}" for name, value in short.items()) or self._sets
            self._rows[-1][1] = " ".join(f"{value:>{len(name)}}" for name, value in short.items())
        shown = ", ".join(f"{name} {value:.3f}" for name, value in rewards.items())
        shown = shown if len(rewards) > 1 else shown.removeprefix(f"{_NAMES[1]} ")
        self._console.print(f"held-out reward after step {version}: {shown}", soft_wrap=True)

    def close(self) -> None:
        self._phase = ""
        if self._is_live:
            self._live.stop()

    def _time_left(self, version: int) -> str:
        """Returns how long the steps after `version` will take, from the last steps' times without saving."""
        if not self._step_s:
            return ""
        left = timedelta(seconds=round((self._num_steps - version) * median(self._step_s)))
        return f", about {left} left"

    def _shown(self) -> RenderableType:
        if self._episode is None:
            return self._table(self._console.height)
        version, conversation = self._episode
        height = min(_EPISODE_LINES, self._console.height // 2)
        below = show_conversation(conversation, f"step {version}", self._console.width, height)
        return Group(self._table(self._console.height - height), below)

    def _table(self, height: int) -> Table:
        """Builds a table of the last rows and the most important columns, as many as fit."""
        num_rows = max(1, min(_ROWS, height - _FRAME))
        lines = [(_NAMES[0], self._sets, *_NAMES[2:]), *self._rows[-num_rows:]]
        phase_s = time.monotonic() - self._phase_began_s
        phase = f"{self._phase}, {phase_s:.0f} s" if self._phase and phase_s >= _LONG_PHASE_S else self._phase
        caption = "\n".join([phase, *self._stages.lines()])
        table = Table(caption=caption, caption_justify="left", expand=False)
        optional = (_SCORE, _TEACHER)
        wanted = [i for i in _BY_IMPORTANCE if i not in optional or any(line[i] for line in lines[1:])]
        columns = [[line[index] for line in lines] for index in fitting(lines, wanted, self._console.width)]
        for name, *_ in columns:
            table.add_column(name, justify="right", no_wrap=True)
        for cells in zip(*(rest for _, *rest in columns), strict=True):
            table.add_row(*cells)
        return table


_COLUMNS = {
    "reward": lambda m: f"{m['reward/mean']:.3f}",
    "teacher KL": lambda m: f"{m['teacher_kl/token_mean']:.3f}" if "teacher_kl/token_mean" in m else "",
    "mixed": lambda m: f"{m['reward/mixed_groups']:.2f}",
    "tokens": lambda m: f"{m['batch/tokens']:.0f}",
    "entropy": lambda m: f"{m['train/entropy']:.3f}",
    "grad norm": lambda m: f"{m['train/grad_norm']:.3f}",
    "diff max": lambda m: f"{m['train/logprob_diff_max']:.1e}",
    # Generating and scoring overlap: each has the time in which it had work. Rewards of a lagged step, for example, may
    # come in another step's time, which then has none.
    "score s": lambda m: f"{m['time/score_busy_s']:.2f}" if "time/score_busy_s" in m else "",
    "generate s": lambda m: f"{m.get('time/generate_busy_s', m['time/generating_s']):.2f}",
    "train s": lambda m: f"{m['time/training_s']:.2f}",
    "publish s": lambda m: f"{m['time/publishing_s']:.2f}",
}
_NAMES = ("step", "held-out", *_COLUMNS)
_HELD_OUT, _SCORE, _TEACHER = map(_NAMES.index, ("held-out", "score s", "teacher KL"))
_MIN_WIDTH = 7  # of a column in a file
_TIMES = ("generate s", "score s", "train s")
_FIRST = ("step", "reward", "teacher KL", "held-out", "grad norm", *_TIMES, "entropy", "diff max")
_BY_IMPORTANCE = [_NAMES.index(name) for name in dict.fromkeys((*_FIRST, *_NAMES))]
