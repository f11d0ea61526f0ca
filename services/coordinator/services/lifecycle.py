"""What every session does around its work: data, logs, numbers, services that die, signals."""

import asyncio
import logging
import signal
from collections.abc import Callable, Collection, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from lockstep.types.v1.types_pb2 import ModelCard
from rich.console import Console
from rich.logging import RichHandler

from services.common.config.run import Config
from services.common.errors import Unavailable
from services.common.model_card import read_model_card, write_model_card
from services.common.telemetry.context import within
from services.common.telemetry.logs import formatter
from services.coordinator.data.tokenizer import Tokenizer
from services.coordinator.observe.reporters import JsonLines, Reporter, TensorBoard
from services.coordinator.observe.watchers import watchers
from services.coordinator.runs.run import Run
from services.coordinator.services.launch import SERVICES, Addresses, Fleet, launch

Data = TypeVar("Data")
Result = TypeVar("Result")
Load = Callable[[Any, Tokenizer], Data]
"""Reads what a config names, with the tokenizer of its model."""

_LAST_WORDS_S = 5.0


def load_early(config: Config, given: Addresses, load: Load[Data]) -> Data | None:
    """The run's data before anything is started; None if the model is on the trainer's host only.

    Raises:
        LockstepError: The model's directory cannot be used; or as `load`.
    """
    if given.trainer and not Path(config.model).is_dir():
        return None
    read_model_card(config.model)
    return _load(config, Path(config.model), load)


def load_late(config: Config, card: ModelCard, load: Load[Data]) -> Data:
    """The run's data, with the model card that the trainer answered."""
    directory = config.run_dir / "model_card"
    directory.mkdir(exist_ok=True)
    write_model_card(card, directory)
    return _load(config, directory, load)


def _load(config: Config, model: Path, load: Load[Data]) -> Data:
    return load(config, Tokenizer.load(model, chat_template=config.data.chat_template, date=config.data.template_date))


async def with_services(
    work: Callable[[Addresses], Coroutine[Any, Any, Result]],
    run: Run,
    given: Addresses,
    console: Console | None,
    *,
    services: Collection[str] = SERVICES,
    sharing: Config | None = None,
) -> Result:
    """Awaits `work` on the addresses of `services`: those without one are started first, and ended afterwards.

    `sharing` is that of `launch`. Everything is logged, to `console` too; without one it is the caller's business.

    Raises:
        LockstepError: As the first failure of any part.
    """
    if console is not None:
        _log_to(run.config, console)
    with within(run=run.run_id):
        run.watchers = watchers(run)
        async with launch(run.config, given, services=services, sharing=sharing) as fleet:
            return await unless_service_dies(work(fleet.addresses), fleet)


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


def keepers(config: Config, version: int) -> list[Reporter]:
    """What keeps the numbers of a run that goes on from `version`."""
    directory = config.run_dir
    return [JsonLines(directory / "metrics.jsonl", version), TensorBoard(directory / "tensorboard", version)]


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


def log_file(config: Config) -> logging.Handler:
    """Appends records to the run's coordinator.log, whose directory is made."""
    path = config.run_dir / "logs" / "coordinator.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    to_file = logging.FileHandler(path)
    to_file.setFormatter(formatter(config.observability.log_format, "coordinator"))
    return to_file


def _log_to(config: Config, console: Console) -> None:
    """Everything to coordinator.log, warnings to `console` too, where that is no terminal as lines of any length."""
    to_console: logging.Handler = logging.StreamHandler(console.file)
    line = "%(asctime)s %(levelname)s %(message)s"
    if console.is_terminal:
        to_console, line = RichHandler(console=console, show_path=False, rich_tracebacks=False), "%(message)s"
    to_console.setLevel(logging.WARNING)
    to_console.setFormatter(logging.Formatter(line))
    logging.basicConfig(level=logging.INFO, handlers=[log_file(config), to_console], force=True)
