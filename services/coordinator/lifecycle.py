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
from services.coordinator.data.tokenizer import Tokenizer
from services.coordinator.launch import SERVICES, Addresses, Fleet, launch
from services.coordinator.reporters import JsonLines, Reporter, TensorBoard
from services.coordinator.run import Run
from services.coordinator.trace import RunTrace

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
    console: Console,
    *,
    services: Collection[str] = SERVICES,
) -> Result:
    """Awaits `work` on the addresses of `services`: those without one are started first, and ended afterwards.

    Raises:
        LockstepError: As the first failure of any part.
    """
    _log_to(run.config.run_dir / "logs" / "coordinator.log", console)
    async with launch(run.config, given, services=services) as fleet:
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
    traces = [RunTrace(directory)] if config.trace else []
    return [JsonLines(directory / "metrics.jsonl", version), TensorBoard(directory / "tensorboard", version), *traces]


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


def _log_to(path: Path, console: Console) -> None:
    """Everything to `path`, warnings to the terminal too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    to_file = logging.FileHandler(path)
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s"))
    to_terminal = RichHandler(logging.WARNING, console, show_path=False, rich_tracebacks=False)
    logging.basicConfig(level=logging.INFO, handlers=[to_file, to_terminal], force=True)
