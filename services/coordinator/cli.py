"""The `lockstep` command. Nothing heavy is imported before a command needs it."""

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from services.common.config.load import keys, load
from services.common.errors import LockstepError
from services.coordinator.data.cli import app as data_app

if TYPE_CHECKING:
    from services.coordinator.launch import Addresses

app = typer.Typer(
    help="Reinforcement-learning post-training of language models, on-policy by contract.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(data_app(), name="data")

_console = Console()
_errors = Console(stderr=True)


_Configs = Annotated[list[str], typer.Argument(help="YAML files and key=value overrides, the last one wins.")]
_Rollout = Annotated[list[str] | None, typer.Option(help="HOST:PORT of a running replica; repeat for more.")]
_Reward = Annotated[str, typer.Option(help="HOST:PORT of a running reward service.")]
_Trainer = Annotated[str, typer.Option(help="HOST:PORT of a running trainer.")]
_RunDir = Annotated[Path, typer.Argument(help="Directory of a run.")]
_Beside = Annotated[str, typer.Option(help="HOST:PORT of the trainer that this model has for itself.")]


@app.command()
def run(
    config: _Configs,
    rollout: _Rollout = None,
    reward: _Reward = "",
    trainer: _Trainer = "",
    reference: _Beside = "",
    critic: _Beside = "",
) -> None:
    """Train. Services without an address are started on this host and ended with the run."""
    from services.common.config.run import Config
    from services.coordinator.plan import check_model
    from services.coordinator.session import run_session, show_outcome

    settings = load(Config, config)
    given = _addresses(rollout, reward=reward, trainer=trainer, reference=reference, critic=critic)
    given.require_own(settings)
    check_model(settings)
    show_outcome(asyncio.run(run_session(settings, given, _console)), _console)


@app.command()
def sft(config: _Configs, trainer: _Trainer = "") -> None:
    """Train supervised, on prompts and responses: the trainer alone, which is started here if it has no address."""
    from services.common.config.sft import SftConfig
    from services.coordinator.plan import check_model
    from services.coordinator.sft_session import sft_session, show_outcome

    settings, given = load(SftConfig, config), _addresses(trainer=trainer)
    check_model(settings)
    show_outcome(asyncio.run(sft_session(settings, given, _console)), _console)


@app.command("eval")
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint of a run, or a Hugging Face model directory.")],
    config: _Configs,
    out: Annotated[Path | None, typer.Option(help="Directory for the results; below the run's if not given.")] = None,
    rollout: _Rollout = None,
    reward: _Reward = "",
    trainer: _Trainer = "",
) -> None:
    """Evaluate a checkpoint or a model on the held-out sets of a run, whose own files are left as they are."""
    from services.common.config.run import Config
    from services.coordinator.eval_session import eval_config, eval_session, show_evaluation

    settings = eval_config(load(Config, config), checkpoint, out)
    given = _addresses(rollout, reward=reward, trainer=trainer)
    show_evaluation(asyncio.run(eval_session(settings, given, _console)), _console)


@app.command()
def report(
    run_dir: _RunDir, out: Annotated[Path | None, typer.Option(help="File to write; report.html of the run.")] = None
) -> None:
    """Write a page of a run's curves, samples and failures, for a browser without a network."""
    from services.coordinator.report.page import write_report

    _console.print(f"wrote {write_report(run_dir, out)}", soft_wrap=True)


@app.command()
def replay(
    run_dir: _RunDir,
    step: Annotated[int, typer.Option(help="Step to do again, counted from 1.")],
    what: Annotated[str, typer.Option(help="rewards or train; both if not given.")] = "",
    reward: _Reward = "",
    trainer: _Trainer = "",
) -> None:
    """Score and train a recorded step again and list what differs: exit code 1 if anything does."""
    from services.coordinator.replay.session import parse_what, replay_session, show_replayed

    given = _addresses(reward=reward, trainer=trainer)
    replayed = asyncio.run(replay_session(run_dir, step, parse_what(what), given, _console))
    show_replayed(replayed, _console)
    raise typer.Exit(1 if replayed.differences else 0)


@app.command()
def doctor(
    config: Annotated[list[str] | None, typer.Argument(help="As of run; more can be checked with it.")] = None,
    rollout: _Rollout = None,
    reward: _Reward = "",
    trainer: _Trainer = "",
) -> None:
    """Look at this host, and at running services, before a run: exit code 1 if something would fail."""
    from services.common.config.run import Config
    from services.coordinator.doctor.session import examine

    settings = load(Config, config) if config else None
    is_well = examine(settings, _addresses(rollout, reward=reward, trainer=trainer), _console)
    raise typer.Exit(0 if is_well else 1)


@app.command()
def plan(config: _Configs) -> None:
    """Show what each trainer rank would hold, its memory and what a publication sends. Starts nothing."""
    from services.common.config.run import Config
    from services.coordinator.plan import show_plan

    show_plan(load(Config, config), _console)


@app.command()
def config(sft: Annotated[bool, typer.Option("--sft", help="Those of a supervised run.")] = False) -> None:
    """List every config key with its type, default and help."""
    from services.common.config.run import Config
    from services.common.config.sft import SftConfig

    table = Table("key", "type", "default", "meaning")
    for key in keys(SftConfig if sft else Config):
        table.add_row(key.path, key.type, key.default, key.help)
    _console.print(table)


def _addresses(rollout: list[str] | None = None, **others: str) -> "Addresses":
    from services.common.rpc import parse_address
    from services.coordinator.launch import Addresses

    for name, address in [*others.items(), *(("rollout", address) for address in rollout or ())]:
        if address:
            parse_address(address, field=f"--{name}")
    return Addresses(tuple(rollout or ()), **others)


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
