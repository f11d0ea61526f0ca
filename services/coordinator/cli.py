"""The `lockstep` command. Nothing heavy is imported before a command needs it."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from services.common.config.load import keys, load
from services.common.errors import LockstepError
from services.coordinator.data.cli import app as data_app

app = typer.Typer(
    help="Reinforcement-learning post-training of language models, on-policy by contract.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(data_app(), name="data")

_console = Console()
_errors = Console(stderr=True)


@app.command()
def run(
    config: Annotated[list[str], typer.Argument(help="YAML files and key=value overrides, the last one wins.")],
    rollout: Annotated[list[str] | None, typer.Option(help="HOST:PORT of a running replica; repeat for more.")] = None,
    reward: Annotated[str, typer.Option(help="HOST:PORT of a running reward service.")] = "",
    trainer: Annotated[str, typer.Option(help="HOST:PORT of a running trainer.")] = "",
) -> None:
    """Train. Services without an address are started on this host and ended with the run."""
    from services.common.config.run import Config
    from services.common.rpc import parse_address
    from services.coordinator.launch import Addresses
    from services.coordinator.plan import check_model
    from services.coordinator.session import run_session

    settings = load(Config, config)
    for option, address in [("--reward", reward), ("--trainer", trainer), *(("--rollout", r) for r in rollout or ())]:
        if address:
            parse_address(address, field=option)
    check_model(settings)
    given = Addresses(tuple(rollout or ()), reward, trainer)
    outcome = asyncio.run(run_session(settings, given, _console))
    _summarise(outcome.evaluations, outcome.version, settings.run_dir, outcome.export_path)


@app.command()
def plan(
    config: Annotated[list[str], typer.Argument(help="YAML files and key=value overrides, the last one wins.")],
) -> None:
    """Show what each trainer rank would hold, its memory and what a publication sends. Starts nothing."""
    from services.common.config.run import Config
    from services.coordinator.plan import show_plan

    show_plan(load(Config, config), _console)


@app.command()
def config() -> None:
    """List every config key with its type, default and help."""
    from services.common.config.run import Config

    table = Table("key", "type", "default", "meaning")
    for key in keys(Config):
        table.add_row(key.path, key.type, key.default, key.help)
    _console.print(table)


def _summarise(evaluations: list[dict[str, float]], version: int, run_dir: Path, export_path: Path | None) -> None:
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        table = Table("held-out", f"before (step {first['version']})", f"after (step {last['version']})")
        for name in first:
            if name != "version":
                table.add_row(name.removeprefix("eval/"), f"{first[name]:.3f}", f"{last.get(name, float('nan')):.3f}")
        _console.print(table)
    lines = [
        f"{version} steps done. Files of this run, in {run_dir}:",
        "  metrics.jsonl, tensorboard/  numbers of every step",
        "  batches/, evaluations/       every sample with tokens, rewards and policy stamp, as Parquet",
        "  ledger.sqlite, logs/         every decision with hashes of its inputs; what each service wrote",
    ]
    if export_path:
        lines.append("  model/                       the trained model, for transformers or vLLM")
    lines.append("Next: plot it with `tensorboard --logdir`, or train your own model on your own data: README.md")
    for line in lines:
        _console.print(line, soft_wrap=True, highlight=False)


def main() -> None:
    """Entry point: a failure is one line and exit code 2, an interruption exit code 130."""
    try:
        app()
    except LockstepError as error:
        _errors.print(f"lockstep: error: {error.message}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    except (KeyboardInterrupt, asyncio.CancelledError):
        _errors.print("lockstep: stopped")
        sys.exit(130)
