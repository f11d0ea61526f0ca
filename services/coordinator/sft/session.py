"""Runs an SFT config for `lockstep sft`. The trainer is the only service."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from rich.console import Console

from services.common.config.sft import SftConfig
from services.coordinator.data.prompts import load_from_card, load_if_local
from services.coordinator.fleet.launch import Addresses
from services.coordinator.fleet.opening import close_run, finish, outcome_if_finished
from services.coordinator.fleet.running import Sessions, recorded_run
from services.coordinator.observe.frontend import Outcome, cancel_on_sigterm, show, stop_on_signal
from services.coordinator.observe.reporters import files
from services.coordinator.runs.reporter import Reporter, in_order
from services.coordinator.runs.resume import await_ledger
from services.coordinator.runs.run import Run
from services.coordinator.sft.loop import SftData, SftTrainer, train, use_rows
from services.coordinator.sft.rows import SftDataset, SftFile
from services.coordinator.text.tokenizer import Tokenizer

_FILES = {
    "metrics.jsonl, tensorboard/": "metrics of every step",
    "ledger.sqlite, logs/": "every decision; the trainer's log",
    "model/": "the trained model, for `model` of an RL run or for vLLM",
}


async def run_session(config: SftConfig, external: Addresses, console: Console) -> Outcome:
    """Runs `config` until all steps are done or Ctrl-C stops it.

    If the trainer was started here and dies, it is started again and the run resumes, as far as `restart` allows.

    Raises:
        LockstepError: The first failure of any part.
    """
    cancel_on_sigterm()
    async with Sessions(config, external) as sessions:
        loaded = load_data(config, external)
        while True:
            with sessions.repeating():
                return await _run_once(sessions, console, loaded)


async def _run_once(sessions: Sessions[SftConfig], console: Console, data: SftData | None) -> Outcome:
    config = sessions.config
    await await_ledger(config)
    with recorded_run(config, console) as run:
        if data is not None:
            use_rows(run, data.train, data.held_out)
        if outcome := outcome_if_finished(run, partial(console.print, soft_wrap=True)):
            return outcome
        async with (
            sessions.running_services(run, ["trainer"]) as addresses,
            _open_trainer(run, addresses, console) as trainer,
        ):
            version = run.last_finished(trainer.opened.version, trainer.opened.last_batch_id)
            if data is None:
                data = load_from_card(config, trainer.opened.model_card, _load)
                use_rows(run, data.train, data.held_out)
            console.print(run.describe_start(version, trainer.opened.version), soft_wrap=True, highlight=False)
            run.begin(version, [*files(run, version), Lines(console, run.num_steps)])
            stop_on_signal(run, console)
            await train(run, data, trainer)
            return await finish(run, trainer)


def load_data(config: SftConfig, external: Addresses) -> SftData | None:
    """Reads the run's rows. Returns None if only the trainer's host has the model, whose tokenizer is needed."""
    return load_if_local(config, _load, model_is_remote=bool(external.trainer))


@asynccontextmanager
async def _open_trainer(run: Run[SftConfig], addresses: Addresses, console: Console) -> AsyncIterator[SftTrainer]:
    where = f"run {run.run_id} in {run.config.run_dir}"
    console.print(f"{where}: opening trainer {addresses.trainer}", soft_wrap=True)
    trainer = SftTrainer(addresses.trainer, run.config, addresses.transport)
    try:
        await trainer.open(run.run_id, run.resume_from)
        yield trainer
    finally:
        await trainer.close()
    await close_run(run, addresses)


def show_outcome(outcome: Outcome, console: Console) -> None:
    show(outcome, _FILES, console, number=".4g")


class Lines(Reporter):
    """Prints a line for every step and evaluation."""

    def __init__(self, console: Console, num_steps: int):
        self._console, self._num_steps = console, num_steps

    def step(self, version: int, metrics: dict[str, float]) -> None:
        shown = f"loss {metrics['train/loss']:.4f}  grad norm {metrics['train/grad_norm']:.3f}"
        shown += f"  lr {metrics['train/lr']:.2e}  {metrics['time/tokens_per_s']:.0f} tokens/s"
        self._print(f"step {version:>{len(str(self._num_steps))}} of {self._num_steps}  {shown}")

    def evaluation(self, version: int, metrics: dict[str, float]) -> None:
        shown = "  ".join(f"{name.removeprefix('eval/')} {value:.4g}" for name, value in in_order(metrics).items())
        self._print(f"held-out after step {version}  {shown}")

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False)


def _load(config: SftConfig, tokenizer: Tokenizer) -> SftData:
    train_data = SftDataset.load(config.data, tokenizer, seed=config.seed)
    return SftData(train_data, SftFile.held_out(config.data, tokenizer))
