"""Who a session is run for: the terminal of one command, or all who watch a daemon."""

from typing import Protocol

from rich.console import Console

from services.coordinator.observe.reporters import Reporter, Terminal
from services.coordinator.runs.run import Run
from services.coordinator.services.lifecycle import stop_on_signal


class Frontend(Protocol):
    """What a session tells while it goes on. Without a `console`, logging has been seen to."""

    console: Console | None

    def say(self, line: str) -> None:
        """What is about to be done."""

    def begin(self, run: Run, version: int) -> Reporter:
        """The loop goes on from `version`, and ends after its step once `run.stopping` is set; who hears of it."""


class OnTerminal:
    """`lockstep run`: a live table, stopped with Ctrl-C."""

    def __init__(self, console: Console):
        self.console = console

    def say(self, line: str) -> None:
        self.console.print(line, soft_wrap=True)

    def begin(self, run: Run, version: int) -> Reporter:
        stop_on_signal(run, self.console)
        return Terminal(self.console, run.num_steps)
