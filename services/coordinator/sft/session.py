"""`lockstep sft`: a supervised run from its config to its end. As session.py, with the trainer alone."""

from contextlib import closing

from rich.console import Console

from services.common.config.sft import SftConfig
from services.coordinator.data.tokenizer import Tokenizer
from services.coordinator.observe.reporters import Reporter, in_order
from services.coordinator.runs.outcome import Outcome, finish, show
from services.coordinator.runs.resume import open_run
from services.coordinator.services.closing import close_run
from services.coordinator.services.launch import Addresses
from services.coordinator.services.lifecycle import keepers, load_early, load_late, stop_on_signal, with_services
from services.coordinator.sft.data import SftDataset
from services.coordinator.sft.loop import SftData, SftRun, SftTrainer, train
from services.coordinator.sft.rows import SftFile

_FILES = {
    "metrics.jsonl, tensorboard/": "numbers of every step",
    "ledger.sqlite, logs/": "every decision; what the trainer wrote",
    "model/": "the trained model: the `model` of a run, or for vLLM",
}


async def sft_session(config: SftConfig, given: Addresses, console: Console) -> Outcome:
    """Runs `config` to its end, or to a stop after Ctrl-C.

    Raises:
        LockstepError: As the first failure of any part.
    """
    data = load_early(config, given, _load)
    with closing(SftRun(config, open_run(config))) as run:
        if data is not None:
            run.use_rows(data.train)
        return await with_services(
            lambda addresses: _drive(run, addresses, data, console), run, given, console, services=["trainer"]
        )


def show_outcome(outcome: Outcome, console: Console) -> None:
    """Prints the held-out loss before and after, and where everything is."""
    show(outcome, _FILES, console, number=".4g")


class Lines(Reporter):
    """A line in the terminal for every step and evaluation."""

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


async def _drive(run: SftRun, addresses: Addresses, data: SftData | None, console: Console) -> Outcome:
    config, trainer = run.config, SftTrainer(addresses.trainer, run.config, addresses.transport)
    console.print(f"run {run.run_id} in {config.run_dir}: opening trainer {addresses.trainer}", soft_wrap=True)
    try:
        version = await trainer.open(run.run_id, run.resume_from)
        if data is None:
            data = load_late(config, trainer.opened.model_card, _load)
            run.use_rows(data.train)
        run.begin(version, [*keepers(config, version), Lines(console, run.num_steps)])
        stop_on_signal(run, console)
        await train(run, data, trainer, version)
        outcome = await finish(run, trainer)
    finally:
        await trainer.close()
    await close_run(run, addresses)
    return outcome
