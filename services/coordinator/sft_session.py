"""`lockstep sft`: a supervised run from its config to its end. As session.py, with the trainer alone."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from services.common.config.sft import SftConfig
from services.common.model_card import read_model_card, write_model_card
from services.coordinator.data.sft import SftDataset, load_held_out
from services.coordinator.data.tokenizer import Tokenizer
from services.coordinator.launch import Addresses, Fleet, launch
from services.coordinator.lifecycle import Outcome, export, log_to, stop_on_signal, unless_service_dies
from services.coordinator.reporters import JsonLines, TensorBoard
from services.coordinator.resume import Start, open_run
from services.coordinator.sft import SftData, SftRun, SftTrainer, train


async def sft_session(config: SftConfig, given: Addresses, console: Console) -> Outcome:
    """Runs `config` to its end, or to a stop after Ctrl-C.

    Raises:
        LockstepError: As the first failure of any part.
    """
    data = None
    if Path(config.model).is_dir() or not given.trainer:
        read_model_card(config.model)
        data = _load(config, Path(config.model))
    start = open_run(config)
    run = SftRun(config, start)
    log_to(config.run_dir / "logs" / "coordinator.log", console)
    try:
        if data is not None:
            run.use(data.train)
        async with launch(config, given, trainer_only=True) as fleet:
            return await unless_service_dies(_drive(run, start, fleet, data, console), fleet)
    finally:
        run.close()


def show_outcome(outcome: Outcome, config: SftConfig, console: Console) -> None:
    """Prints the held-out loss before and after, and where everything is."""
    if outcome.evaluations:
        first, last = outcome.evaluations[0], outcome.evaluations[-1]
        table = Table("held-out", f"before (step {first['version']})", f"after (step {last['version']})")
        for name in sorted(first.keys() & last.keys() - {"version"}):
            table.add_row(name.removeprefix("eval/"), f"{first[name]:.4g}", f"{last[name]:.4g}")
        console.print(table)
    lines = [
        f"{outcome.version} steps done. Files of this run, in {config.run_dir}:",
        "  metrics.jsonl, tensorboard/  numbers of every step",
        "  ledger.sqlite, logs/         every decision; what the trainer wrote",
    ]
    if outcome.export_path:
        lines.append("  model/                       the trained model: the `model` of a run, or for vLLM")
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)


class Lines:
    """A line in the terminal for every step and evaluation."""

    def __init__(self, console: Console, num_steps: int):
        self._console, self._num_steps = console, num_steps

    def phase(self, name: str, version: int) -> None: ...

    def step(self, version: int, metrics: dict[str, float]) -> None:
        shown = f"loss {metrics['train/loss']:.4f}  grad norm {metrics['train/grad_norm']:.3f}"
        shown += f"  lr {metrics['train/lr']:.2e}  {metrics['time/tokens_per_s']:.0f} tokens/s"
        self._print(f"step {version:>{len(str(self._num_steps))}} of {self._num_steps}  {shown}")

    def evaluation(self, version: int, metrics: dict[str, float]) -> None:
        shown = "  ".join(f"{name.removeprefix('eval/')} {value:.4g}" for name, value in metrics.items())
        self._print(f"held-out after step {version}  {shown}")

    def close(self) -> None: ...

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False)


def _load(config: SftConfig, model: Path) -> SftData:
    tokenizer = Tokenizer.load(model, chat_template=config.data.chat_template, date=config.data.template_date)
    train_data = SftDataset.load(config.data, tokenizer, seed=config.seed)
    return SftData(train_data, load_held_out(config.data, tokenizer))


async def _drive(run: SftRun, start: Start, fleet: Fleet, data: SftData | None, console: Console) -> Outcome:
    config, directory = run.config, run.config.run_dir
    trainer = SftTrainer(fleet.addresses.trainer, config)
    console.print(f"run {run.run_id} in {directory}: opening trainer {fleet.addresses.trainer}", soft_wrap=True)
    try:
        version = await trainer.open(run.run_id, start.checkpoint)
        if data is None:  # the model is on the trainer's host only
            card = directory / "model_card"
            card.mkdir(exist_ok=True)
            write_model_card(trainer.opened.model_card, card)
            data = _load(config, card)
            run.use(data.train)
        files = [JsonLines(directory / "metrics.jsonl", version), TensorBoard(directory / "tensorboard", version)]
        run.begin(version, [Lines(console, run.num_steps), *files])
        stop_on_signal(run, console)
        await train(run, data, trainer, version)
        export_path = await export(run, trainer)
        return Outcome(run.version, run.evaluations(), export_path)
    finally:
        await trainer.close()
