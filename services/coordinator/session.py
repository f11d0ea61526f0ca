"""A run from its config to its end: checks what can be checked first, then services, then the loop."""

import asyncio
import logging
import signal
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.logging import RichHandler

from services.common.config.run import Config
from services.common.errors import Unavailable
from services.common.model_card import read_model_card, write_model_card
from services.common.tasks import gather
from services.coordinator.clients.reward import Reward
from services.coordinator.clients.rollout import Rollout
from services.coordinator.clients.trainer import Trainer
from services.coordinator.collect import Collector
from services.coordinator.data.prompts import PromptDataset, Prompts, load_eval
from services.coordinator.data.tokenizer import Tokenizer
from services.coordinator.launch import Addresses, Fleet, launch
from services.coordinator.loop import Parts, train
from services.coordinator.publication import Publisher
from services.coordinator.reporters import JsonLines, Reporter, TensorBoard, Terminal
from services.coordinator.resume import Start, open_run
from services.coordinator.run import Phase, Run

log = logging.getLogger(__name__)

_LAST_WORDS_S = 5.0


@dataclass(frozen=True)
class Outcome:
    """What a finished run leaves."""

    version: int
    evaluations: list[dict[str, float]]
    export_path: Path | None


async def run_session(config: Config, given: Addresses, console: Console) -> Outcome:
    """Runs `config` to its end, or to a stop after Ctrl-C.

    Raises:
        LockstepError: As the first failure of any part.
    """
    dataset = None
    if Path(config.model).is_dir() or not given.trainer:
        read_model_card(config.model)
        dataset = _load_data(config, Path(config.model))
    start = open_run(config)
    run = Run(config, start)
    _log(config.run_dir / "logs" / "coordinator.log", console)
    try:
        async with launch(config, given) as fleet:
            return await _unless_service_dies(_drive(run, start, fleet, dataset, console), fleet)
    finally:
        run.close()


@dataclass(frozen=True)
class _Dataset:
    tokenizer: Tokenizer
    train: PromptDataset
    eval: dict[str, Prompts]


def _load_data(config: Config, model: Path) -> _Dataset:
    tokenizer = Tokenizer.load(model, chat_template=config.data.chat_template, date=config.data.template_date)
    train_data = PromptDataset.load(config.data, tokenizer, seed=config.seed)
    return _Dataset(tokenizer, train_data, load_eval(config.data, tokenizer))


async def _drive(run: Run, start: Start, fleet: Fleet, dataset: _Dataset | None, console: Console) -> Outcome:
    config, addresses = run.config, fleet.addresses
    trainer, reward = Trainer(addresses.trainer, config), Reward(addresses.reward, config)
    rollout = Rollout(addresses.rollout, config)
    console.print(f"run {run.run_id} in {config.run_dir}")
    replicas = ", ".join(addresses.rollout)
    console.print(f"opening trainer {addresses.trainer}, reward {addresses.reward}, rollout {replicas}", soft_wrap=True)
    try:
        version = await trainer.open(run.run_id, start.checkpoint)
        card = trainer.opened.model_card
        await gather([reward.open(run.run_id), rollout.open(run.run_id, card)])
        if dataset is None:  # the model is on the trainer's host only
            directory = config.run_dir / "model_card"
            directory.mkdir(exist_ok=True)
            write_model_card(card, directory)
            dataset = _load_data(config, directory)
        run.begin(version, _reporters(config, version, console))
        collector = Collector(rollout, reward, dataset.tokenizer, config.seed)
        publisher = Publisher(trainer, rollout, run)
        _stop_on_signal(run, console)
        await train(run, Parts(dataset.train, dataset.eval, collector, trainer, publisher), version)
        export_path = await _export(run, trainer)
        return Outcome(run.version, run.evaluations(), export_path)
    finally:
        await gather([trainer.close(), reward.close(), rollout.close()])


def _reporters(config: Config, version: int, console: Console) -> list[Reporter]:
    directory = config.run_dir
    files = [JsonLines(directory / "metrics.jsonl", version), TensorBoard(directory / "tensorboard", version)]
    return [Terminal(console, config.num_steps), *files]


async def _export(run: Run, trainer: Trainer) -> Path | None:
    path = (run.config.run_dir / "model").absolute()
    if run.version < run.num_steps or not run.config.checkpoint.export_at_end:
        return None
    if not path.exists():
        with run.phase(Phase.CHECKPOINTING):
            await trainer.export(str(path))
    return path


async def _unless_service_dies(work: Coroutine[Any, Any, Outcome], fleet: Fleet) -> Outcome:
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


def _stop_on_signal(run: Run, console: Console) -> None:
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


def _log(path: Path, console: Console) -> None:
    """Everything to `path`, warnings to the terminal too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    to_file = logging.FileHandler(path)
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s"))
    to_terminal = RichHandler(logging.WARNING, console, show_path=False, rich_tracebacks=False)
    logging.basicConfig(level=logging.INFO, handlers=[to_file, to_terminal], force=True)
