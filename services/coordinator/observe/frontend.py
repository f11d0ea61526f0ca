"""Connects a session to its viewers (the terminal of one command, or all clients of a daemon) and to its log."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table

from services.common.config.load import AnyConfig
from services.common.errors import counted
from services.common.files import writing
from services.common.telemetry import InertFormatter, formatter
from services.coordinator.observe.terminal import Terminal
from services.coordinator.runs.checkpoints import change_between
from services.coordinator.runs.reporter import Reporter
from services.coordinator.runs.run import Run

log = logging.getLogger(__name__)


class Frontend(Protocol):
    """Shows the progress of a session. If `console` is None, the caller has already configured logging."""

    @property
    def console(self) -> Console | None: ...  # shows the log's warnings

    def start(self) -> None: ...  # is called when the session starts, in its task

    def say(self, line: str) -> None: ...  # shows a line about the session's next action

    def begin(self, run: Run, version: int) -> Reporter:
        """Returns a reporter for the loop, which starts at `version` and stops once `run.stopping` is set."""
        ...


class TerminalFrontend:
    """Shows a live table for `lockstep run`; Ctrl-C stops the run."""

    def __init__(self, console: Console):
        self.console = console

    def start(self) -> None:
        cancel_on_sigterm()

    def say(self, line: str) -> None:
        self.console.print(line, soft_wrap=True)
        log.info(line)  # the terminal may be gone when it is needed

    def begin(self, run: Run, version: int) -> Reporter:
        stop_on_signal(run, self.console)
        return Terminal(self.console, run.num_steps)


def cancel_on_sigterm() -> None:
    """Cancels the current task on SIGTERM, until `stop_on_signal` sets another handler."""
    task = asyncio.current_task()
    assert task, "a session runs in a task"
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def stop_on_signal(run: Run[AnyConfig], console: Console) -> None:
    """Stops the run after its current step on the first Ctrl-C or SIGTERM, and immediately on the second.

    The end of the terminal (SIGHUP, which may come twice) stops it after its current step, unless it was started with
    nohup. All stop immediately while a run whose trainer died is opened again.
    """
    loop, main = asyncio.get_running_loop(), asyncio.current_task()

    def stop() -> None:
        if (run.stopping or run.is_closed) and main:
            main.cancel()
            return
        run.stopping = True
        console.print("stopping after this step; interrupt again to stop now")

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, _stop_without_terminal, run, main)


def _stop_without_terminal(run: Run[AnyConfig], main: asyncio.Task[object] | None) -> None:
    when = "after this step"
    if run.is_closed and main:  # the next session has another run
        main.cancel()
        when = "now"
    run.stopping = True
    for descriptor in filter(os.isatty, (0, 1, 2)):  # nobody reads it any more, and each write would fail
        with open(os.devnull, "r+b") as nowhere:
            os.dup2(nowhere.fileno(), descriptor)
    log.info("the terminal has ended: stopping %s", when)


@dataclass(frozen=True)
class Outcome:
    directory: Path
    version: int
    num_steps: int
    evaluations: list[dict[str, float]]
    export_path: Path | None
    best: Mapping[str, float] | None = None
    """Metrics and version of the best saved step, if `checkpoint.keep_best` is set."""
    other_scorers: str = ""
    """How the scorers or the environment of the last evaluation differ from those of the first."""
    is_start_better: bool = False
    """Whether the evaluation before the first step was better than that of the best saved step."""

    @property
    def is_stopped(self) -> bool:
        """Whether steps are left, which the same command would do."""
        return self.version < self.num_steps

    @classmethod
    def of(cls, run: Run[AnyConfig], version: int, num_steps: int, export_path: Path | None) -> Self:
        evaluations, change, first = run.record.evaluations(), "", None
        if evaluations:
            first, last = int(evaluations[0]["version"]), int(evaluations[-1]["version"])
            change = change_between(run.record.ledger, first, last)
        best, by = run.checkpoints.best(), run.config.checkpoint.keep_best
        is_start_better = bool(
            best and by and not change and first == 0 and by.is_better(evaluations[0][by.metric], best[by.metric])
        )
        return cls(run.config.run_dir, version, num_steps, evaluations, export_path, best, change, is_start_better)


def show(outcome: Outcome, files: Mapping[str, str], console: Console, *, number: str) -> None:
    """Prints the first and last held-out metrics, formatted as `number`, and the run's `files` with their contents."""
    if outcome.evaluations:
        shown = [outcome.evaluations[0], *outcome.evaluations[1:][-1:]]
        table = Table("held-out", *(f"after step {metrics['version']}" for metrics in shown))
        for name in dict.fromkeys(name for metrics in shown for name in metrics if name != "version"):
            values = (format(metrics[name], number) if name in metrics else "-" for metrics in shown)
            table.add_row(name.removeprefix("eval/"), *values)
        console.print(table)
    if outcome.other_scorers:
        what = f"These columns cannot be compared, they were scored differently: {outcome.other_scorers}."
        console.print(what, style="bold", soft_wrap=True)
    is_there = {"model/": outcome.export_path, "evaluations/": outcome.evaluations}
    shown_files = {name: what for name, what in files.items() if is_there.get(name, True)}
    if outcome.best:
        but = ", but the starting model was better" if outcome.is_start_better else ""
        what = f"the best checkpoint, by checkpoint.keep_best{but}"
        shown_files[f"checkpoints/step-{outcome.best['version']:06d}"] = what
    done = f"{counted(outcome.version, 'step')} done."
    if outcome.is_stopped:
        so_far = f"{outcome.version} of {counted(outcome.num_steps, 'step')} done"
        done = f"Stopped: {so_far}. Run the same command again to resume."
    lines = (f"  {name:<28} {what}" for name, what in shown_files.items())
    for line in (f"{done} Files in {outcome.directory}:", *lines):
        console.print(line, soft_wrap=True, highlight=False)


class RunLog(logging.FileHandler):
    """Appends to a run's log. If the disk fails, says so once on stderr instead of a traceback for every record."""

    _has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_failed:
            self._has_failed = True
            with contextlib.suppress(OSError):
                sys.stderr.write(f"lockstep: warning: {self.baseFilename} misses lines: {error.strerror}\n")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of lines that the disk did not take
            super().close()


def log_file(config: AnyConfig) -> logging.Handler:
    """Returns a handler that appends to the run's logs/coordinator.log. Creates the directory."""
    path = config.run_dir / "logs" / "coordinator.log"
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        to_file = RunLog(path)
    to_file.setFormatter(formatter(config.observability.log_format, "coordinator"))
    return to_file


def log_to(config: AnyConfig, console: Console) -> None:
    """Logs everything to coordinator.log and warnings also to `console`, unwrapped if it is not a terminal."""
    to_console: logging.Handler = logging.StreamHandler(console.file)
    line = "%(asctime)s %(levelname)s %(message)s"
    if console.is_terminal:
        to_console, line = RichHandler(console=console, show_path=False, rich_tracebacks=False), "%(message)s"
    to_console.setLevel(logging.WARNING)
    to_console.setFormatter(InertFormatter(line))
    logging.basicConfig(level=logging.INFO, handlers=[log_file(config), to_console], force=True)
