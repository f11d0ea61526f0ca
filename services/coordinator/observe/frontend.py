"""Connects a session to whoever follows it: the terminal of one command, or everybody who watches a daemon."""

import asyncio
import signal
from typing import Protocol

from rich.console import Console

from services.coordinator.observe.reporters import Terminal
from services.coordinator.runs.reporter import Reporter
from services.coordinator.runs.run import Run


class Frontend(Protocol):
    """Shows what a session does. Without a `console` the caller has configured logging already."""

    console: Console | None

    def say(self, line: str) -> None:
        """Announces what is done next."""
        ...

    def begin(self, run: Run, version: int) -> Reporter:
        """Returns the reporter of the loop, which starts at `version` and ends once `run.stopping` is set."""
        ...


class TerminalFrontend:
    """Shows a live table for `lockstep run`; Ctrl-C stops the run."""

    def __init__(self, console: Console):
        self.console: Console | None = console
        self._console = console

    def say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True)

    def begin(self, run: Run, version: int) -> Reporter:
        stop_on_signal(run, self._console)
        return Terminal(self._console, run.num_steps)


def stop_on_signal(run: Run, console: Console) -> None:
    """Ends the run after its step on the first Ctrl-C or SIGTERM, and at once on the second."""
    loop, main = asyncio.get_running_loop(), asyncio.current_task()

    def stop() -> None:
        if run.stopping and main:
            main.cancel()
            return
        run.stopping = True
        console.print("stopping after this step; once more to stop now")

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
