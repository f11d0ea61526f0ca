"""Implements the reporters for the terminal and TensorBoard."""

import json
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from services.common.config.load import AnyConfig
from services.common.files.storage import writing
from services.coordinator.compat.tensorboardx import import_event_writer
from services.coordinator.data.groups import Conversation
from services.coordinator.observe.console import fitting
from services.coordinator.observe.episodes import show_conversation
from services.coordinator.runs.ledger import Kind, Ledger
from services.coordinator.runs.reader import METRICS, metrics_lines
from services.coordinator.runs.reporter import Reporter, in_order
from services.coordinator.runs.run import Run

log = logging.getLogger(__name__)


class JsonLines(Reporter):
    """Writes one JSON object per step or evaluation.

    Lines that the disk does not take are written later, as soon as it takes them.

    A resumed run removes lines that the ledger does not have, because their steps will be repeated. It takes missing
    and different lines from the ledger, which lacks only the time of an evaluation. A file with damaged lines is kept
    as metrics.damaged.jsonl.

    Args:
        path: The file.
        version: Last step that the run will not repeat.
        ledger: The run's decisions.

    Raises:
        PreconditionFailed: STORAGE_FAILED: the file cannot be written.
    """

    def __init__(self, path: Path, version: int, ledger: Ledger):
        with writing(path):
            found = _read(path)
            lines = {place: _as_recorded(found.get(place), line) for place, line in _recorded(ledger)}
            partial = path.with_suffix(".partial")
            partial.write_text("".join(f"{lines[place]}\n" for place in sorted(lines) if place[0] <= version))
            partial.rename(path)
            self._file, self._waiting = path.open("ab", buffering=0), b""

    def step(self, version: int, metrics: dict[str, float]) -> None:
        self._waiting += (json.dumps({"step": version, **metrics}) + "\n").encode()
        self._write()

    evaluation = step

    def close(self) -> None:
        try:
            self._write()
        finally:
            self._file.close()

    def _write(self) -> None:
        """Writes the waiting lines. If the disk takes only a part, nothing is written and all are tried again later."""
        begin, left = self._file.tell(), self._waiting
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            self._file.truncate(begin)
            raise
        self._waiting = b""


def _recorded(ledger: Ledger) -> Iterator[tuple[tuple[int, bool], str]]:
    for kind in (Kind.FINISHED, Kind.EVALUATED):
        for row in ledger.all(kind):
            version = row.pop("version")
            yield (version, kind is Kind.EVALUATED), json.dumps({"step": version, **row})


def _as_recorded(line: str | None, recorded: str) -> str:
    """Returns `line` if it has all numbers of `recorded`, else `recorded`. Compares text, as numbers may be NaN."""
    if line is None:
        return recorded
    numbers = json.loads(line)
    is_same = all(json.dumps(numbers.get(name)) == json.dumps(value) for name, value in json.loads(recorded).items())
    return line if is_same else recorded


def _read(path: Path) -> dict[tuple[int, bool], str]:
    """Returns the whole lines of `path` by place. Sets a file with damaged lines aside."""
    damaged: list[int] = []
    lines = {line.place: line.text for line in metrics_lines(path, damaged)}
    if damaged:
        copy = path.with_name("metrics.damaged.jsonl")
        path.rename(copy)
        numbers = ", ".join(map(str, damaged))
        log.warning(
            "%s: line %s was damaged and is taken from the ledger; the old file is %s", path, numbers, copy.name
        )
    return lines


_ROWS = 12
_EPISODE_LINES = 14
_MAX_NAME = 12
_FRAME = 6  # lines around the rows: borders, header and a caption of up to two lines


class TensorBoard(Reporter):
    """Writes an event file for TensorBoard.

    It writes in the caller's thread. SummaryWriter would write in a thread of its own, and wait for it forever if that
    thread fails, for example on a full disk.
    """

    def __init__(self, directory: Path, version: int):
        import_event_writer()
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        # Protobuf makes their classes at import.
        events: Any = event_pb2
        summaries: Any = summary_pb2
        self._event, self._summary = events.Event, summaries.Summary
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
            self._writer = EventsWriter(str(directory / "events"))
            start = events.SessionLog(
                status=events.SessionLog.START
            )  # hides what an earlier session wrote for later steps
            self._writer.write_event(self._event(wall_time=time.time(), step=version + 1, session_log=start))
            self._writer.flush()

    def step(self, version: int, metrics: dict[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.write_event(self._event(wall_time=time.time(), step=version, summary=self._summary(value=values)))
        self._writer.flush()

    evaluation = step

    def close(self) -> None:
        self._writer.close()


class Terminal(Reporter):
    """Shows a live table of the last steps, or prints a line per step if the output is not a terminal."""

    def __init__(self, console: Console, num_steps: int):
        self._console, self._num_steps = console, num_steps
        self.shows_samples = console.is_terminal
        self._rows: list[list[str]] = []
        self._step_s: deque[float] = deque(maxlen=_ROWS)
        self._phase, self._sets = "", _NAMES[1]
        self._episode: tuple[int, Conversation] | None = None
        self._live = Live(console=console, get_renderable=self._shown, refresh_per_second=4, transient=False)
        if console.is_terminal:
            self._live.start()
        else:
            console.print(_line(_NAMES), style="bold", soft_wrap=True)

    def begin_phase(self, name: str, version: int) -> None:
        self._phase = name
        if version < self._num_steps:
            self._phase = f"step {version + 1} of {self._num_steps}: {name}{self._time_left(version)}"

    def step(self, version: int, metrics: dict[str, float]) -> None:
        row = [str(version), "", *(show(metrics) for show in _COLUMNS.values())]
        self._rows = [*self._rows[1 - _ROWS :], row]
        self._step_s.append(metrics["time/step_s"])
        if not self._console.is_terminal:
            self._console.print(_line([f"{version}/{self._num_steps}", *row[1:]]), soft_wrap=True)

    def conversation(self, version: int, conversation: Conversation) -> None:
        self._episode = version, conversation

    def evaluation(self, version: int, metrics: dict[str, float]) -> None:
        ordered = {name: value for name, value in in_order(metrics).items() if name.endswith("/reward")}
        rewards = {name.removeprefix("eval/").removesuffix("/reward"): value for name, value in ordered.items()}
        if self._rows:
            short = {_short(name): f"{value:.3f}" for name, value in rewards.items()}
            self._sets = " ".join(f"{name:>{len(value)}}" for name, value in short.items()) or self._sets
            self._rows[-1][1] = " ".join(f"{value:>{len(name)}}" for name, value in short.items())
        shown = ", ".join(f"{name} {value:.3f}".removeprefix(f"{_NAMES[1]} ") for name, value in rewards.items())
        self._console.print(f"held-out reward after step {version}: {shown}", soft_wrap=True)

    def close(self) -> None:
        self._phase = ""
        if self._console.is_terminal:
            self._live.stop()

    def _time_left(self, version: int) -> str:
        """Returns how long the steps after `version` will take, from the last steps' times without saving."""
        if not self._step_s:
            return ""
        left_s = (self._num_steps - version) * median(self._step_s)
        return f", about {timedelta(seconds=round(left_s))} left"

    def _shown(self) -> RenderableType:
        """Builds the table and below it the last sample that was given to `conversation`."""
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
        table = Table(caption=self._phase, caption_justify="left", expand=False)
        wanted = [index for index in _BY_IMPORTANCE if index != _SCORE or any(line[index] for line in lines[1:])]
        columns = [[line[index] for line in lines] for index in fitting(lines, wanted, self._console.width)]
        for name, *_ in columns:
            table.add_column(name, justify="right", no_wrap=True)
        for cells in zip(*(rest for _, *rest in columns), strict=True):
            table.add_row(*cells)
        return table


_COLUMNS = {
    "reward": lambda m: f"{m['reward/mean']:.3f}",
    "mixed": lambda m: f"{m['reward/mixed_groups']:.2f}",
    "tokens": lambda m: f"{m['batch/tokens']:.0f}",
    "entropy": lambda m: f"{m['train/entropy']:.3f}",
    "grad norm": lambda m: f"{m['train/grad_norm']:.3f}",
    "gap max": lambda m: f"{m['train/logprob_gap_max']:.1e}",
    # Generating and scoring overlap: each has the time in which it had work. Rewards of a lagged step, for example, may
    # come in another step's time, which then has none.
    "score s": lambda m: f"{m['time/score_busy_s']:.2f}" if "time/score_busy_s" in m else "",
    "generate s": lambda m: f"{m.get('time/generate_busy_s', m['time/generating_s']):.2f}",
    "train s": lambda m: f"{m['time/training_s']:.2f}",
    "publish s": lambda m: f"{m['time/publishing_s']:.2f}",
}
_NAMES = ("step", "held-out", *_COLUMNS)
_SCORE = _NAMES.index("score s")
_FIRST = ("step", "reward", "held-out", "grad norm", "generate s", "score s", "train s", "entropy", "gap max")
_BY_IMPORTANCE = [_NAMES.index(name) for name in dict.fromkeys((*_FIRST, *_NAMES))]


def _short(name: str) -> str:
    """Returns the name of a held-out set, cut to the width that a column has for it."""
    return name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 1]}…"


def _line(cells: Sequence[str]) -> str:
    return "  ".join(f"{cell:>10}" for cell in cells)


def files(run: Run[AnyConfig], version: int) -> list[Reporter]:
    """Returns the reporters that write a run's metrics to files; the run continues after step `version`."""
    directory = run.config.run_dir
    metrics = JsonLines(directory / METRICS, version, run.record.ledger)
    return [metrics, TensorBoard(directory / "tensorboard", version)]
