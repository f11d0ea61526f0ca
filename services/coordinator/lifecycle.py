"""What every session does around its work: logs, signals, services that die, the export."""

import asyncio
import logging
import signal
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.logging import RichHandler

from services.common.errors import Unavailable
from services.coordinator.clients.trainer import Trainer
from services.coordinator.launch import Fleet
from services.coordinator.run import Phase, Run

Result = TypeVar("Result")

_LAST_WORDS_S = 5.0


@dataclass(frozen=True)
class Outcome:
    """What a finished run leaves."""

    version: int
    evaluations: list[dict[str, float]]
    export_path: Path | None


async def export(run: Run, trainer: Trainer) -> Path | None:
    """Writes the final policy, if the run has come to its end and wants it; where."""
    path = (run.config.run_dir / "model").absolute()
    if run.version < run.num_steps or not run.config.checkpoint.export_at_end:
        return None
    if not path.exists():
        with run.phase(Phase.CHECKPOINTING):
            await trainer.export(str(path))
    return path


async def unless_service_dies(work: Coroutine[Any, Any, Result], fleet: Fleet) -> Result:
    """Awaits `work`, but raises as soon as a started service ends: its callers might wait for it much longer."""
    working, watching = asyncio.create_task(work), asyncio.create_task(fleet.watch())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done() and not working.cancelled() and isinstance(working.exception(), Unavailable):
            # The call noticed first; the service's own end, with its log, says more.
            await asyncio.wait({watching}, timeout=_LAST_WORDS_S)
        return (watching if watching.done() else working).result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def stop_on_signal(run: Run, console: Console) -> None:
    """The first Ctrl-C or SIGTERM ends the run after its step, the second at once."""
    loop, main = asyncio.get_running_loop(), asyncio.current_task()

    def stop() -> None:
        if run.stopping and main:
            main.cancel()
            return
        run.stopping = True
        console.print("stopping after this step; once more to stop now")

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)


def log_to(path: Path, console: Console) -> None:
    """Everything to `path`, warnings to the terminal too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    to_file = logging.FileHandler(path)
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s"))
    to_terminal = RichHandler(logging.WARNING, console, show_path=False, rich_tracebacks=False)
    logging.basicConfig(level=logging.INFO, handlers=[to_file, to_terminal], force=True)
