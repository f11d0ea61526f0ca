"""Connects a session to its viewers: the terminal of one command, or all clients that watch a daemon."""

import asyncio
import signal
from typing import Protocol

from rich.console import Console

from services.common.config.reading.load import AnyConfig
from services.coordinator.observe.reporters import Terminal
from services.coordinator.runs.reporter import Reporter
from services.coordinator.runs.run import Run


class Frontend(Protocol):
    """Shows the progress of a session. If `console` is None, the caller has already configured logging."""

    @property
    def console(self) -> Console | None:
        """Shows the log's warnings."""
        ...

    def start(self) -> None:
        """Is called when the session starts, in its task."""
        ...

    def say(self, line: str) -> None:
        """Shows a line about the session's next action."""
        ...

    def begin(self, run: Run, version: int) -> Reporter:
        """Returns a reporter for the loop, which starts at `version` and stops once `run.stopping` is set."""
        ...


class TerminalFrontend:
    """Shows a live table for `lockstep run`; Ctrl-C stops the run."""

    def __init__(self, console: Console):
        self.console: Console | None = console
        self._console = console

    def start(self) -> None:
        cancel_on_sigterm()

    def say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True)

    def begin(self, run: Run, version: int) -> Reporter:
        stop_on_signal(run, self._console)
        return Terminal(self._console, run.num_steps)


def cancel_on_sigterm() -> None:
    """Cancels the current task on SIGTERM, until `stop_on_signal` sets another handler."""
    task = asyncio.current_task()
    assert task, "a session runs in a task"
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def stop_on_signal(run: Run[AnyConfig], console: Console) -> None:
    """Stops the run after its current step on the first Ctrl-C or SIGTERM, and immediately on the second.

    Stops immediately too while a run whose trainer died is opened again.
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
