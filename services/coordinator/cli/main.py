"""The `lockstep` command. Nothing heavy is imported before a command needs it."""

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from services.common.config.load import keys, load
from services.common.errors import LockstepError
from services.coordinator.cli.certs import app as certs_app
from services.coordinator.cli.data import app as data_app
from services.coordinator.cli.options import takes_addresses
from services.coordinator.cli.remote import app as remote_app
from services.coordinator.cli.remote import run_there

if TYPE_CHECKING:
    from services.coordinator.services.launch import Addresses

app = typer.Typer(
    help="Reinforcement-learning post-training of language models, on-policy by contract.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(data_app(), name="data")
app.add_typer(certs_app(), name="certs")
app.add_typer(remote_app())

_console = Console()
_errors = Console(stderr=True)


_Configs = Annotated[list[str], typer.Argument(help="YAML files and key=value overrides, the last one wins.")]
_RunDir = Annotated[Path, typer.Argument(help="Directory of a run.")]


@app.command()
@takes_addresses("rollout", "reward", "trainer", "reference", "critic", is_operator=True)
def run(
    config: _Configs,
    given: "Addresses",
    coordinator: Annotated[str, typer.Option(help="HOST:PORT of a coordinator to run it; paths are its host's.")] = "",
) -> None:
    """Train. Services without an address are started on this host, or the coordinator's, and ended with the run."""
    from services.common.config.run import Config
    from services.coordinator.checks.plan import check_model
    from services.coordinator.observe.frontend import TerminalFrontend
    from services.coordinator.rl.session import run_session, show_outcome

    settings = load(Config, config)
    given.require_own(settings)
    if coordinator:
        run_there(coordinator, settings, given)
        return
    check_model(settings)
    show_outcome(asyncio.run(run_session(settings, given, TerminalFrontend(_console))), _console)


@app.command()
@takes_addresses("trainer")
def sft(config: _Configs, given: "Addresses") -> None:
    """Train supervised, on prompts and responses: the trainer alone, which is started here if it has no address."""
    from services.common.config.sft import SftConfig
    from services.coordinator.checks.plan import check_model
    from services.coordinator.sft.session import run_session, show_outcome

    settings = load(SftConfig, config)
    check_model(settings)
    show_outcome(asyncio.run(run_session(settings, given, _console)), _console)


@app.command("eval")
@takes_addresses("rollout", "reward", "trainer")
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint of a run, or a Hugging Face model directory.")],
    config: _Configs,
    given: "Addresses",
    out: Annotated[Path | None, typer.Option(help="Directory for the results; below the run's if not given.")] = None,
) -> None:
    """Evaluate a checkpoint or a model on the held-out sets of a run, whose own files are left as they are."""
    from services.common.config.run import Config
    from services.coordinator.checks.plan import check_model
    from services.coordinator.rl.eval_session import eval_config, eval_session, show_evaluation

    settings = eval_config(load(Config, config), checkpoint, out)
    check_model(settings)
    show_evaluation(asyncio.run(eval_session(settings, given, _console)), _console)


@app.command()
def report(
    run_dir: _RunDir, out: Annotated[Path | None, typer.Option(help="File to write; report.html of the run.")] = None
) -> None:
    """Write a page of a run's curves, samples and failures, for a browser without a network."""
    from services.coordinator.observe.report.page import write_report

    _console.print(f"wrote {write_report(run_dir, out)}", soft_wrap=True)


@app.command()
@takes_addresses("reward", "trainer", "critic")
def replay(
    run_dir: _RunDir,
    step: Annotated[int, typer.Option(help="Step to do again, counted from 1.")],
    given: "Addresses",
    what: Annotated[str, typer.Option(help="rewards or train; both if not given.")] = "",
) -> None:
    """Score and train a recorded step again and list what differs: exit code 1 if anything does."""
    from services.coordinator.replay.session import parse_what, replay_session, show_replayed

    replayed = asyncio.run(replay_session(run_dir, step, parse_what(what), given, _console))
    show_replayed(replayed, _console)
    raise typer.Exit(1 if replayed.differences else 0)


@app.command()
@takes_addresses("rollout", "reward", "trainer")
def doctor(
    given: "Addresses",
    config: Annotated[list[str] | None, typer.Argument(help="As of run; more can be checked with it.")] = None,
) -> None:
    """Look at this host, and at running services, before a run: exit code 1 if something would fail."""
    from services.common.config.run import Config
    from services.coordinator.checks.doctor.session import examine

    settings = load(Config, config) if config else None
    is_well = examine(settings, given, _console)
    raise typer.Exit(0 if is_well else 1)


@app.command()
def plan(config: _Configs) -> None:
    """Show what each trainer rank would hold, its memory and what a publication sends. Starts nothing."""
    from services.common.config.run import Config
    from services.coordinator.checks.plan import show_plan

    show_plan(load(Config, config), _console)


@app.command()
def config(
    prefix: Annotated[
        str, typer.Argument(help="Those that begin with it, as trainer.megatron; all if not given.")
    ] = "",
    sft: Annotated[bool, typer.Option("--sft", help="Those of a supervised run.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="All of both, as docs/configuration.md.")] = False,
) -> None:
    """List every config key with its type, default and help."""
    from services.common.config.run import Config
    from services.common.config.sft import SftConfig
    from services.coordinator.cli.config_list import below, show_keys
    from services.coordinator.cli.config_page import config_page

    if markdown:
        typer.echo(config_page(), nl=False)
        return
    show_keys(below(prefix, list(keys(SftConfig if sft else Config))), _console)


def main() -> None:
    """Entry point: a failure is one line and exit code 2, an interruption exit code 130."""
    try:
        app()
    except LockstepError as error:
        _errors.print(f"lockstep: error: {error.message}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    except asyncio.CancelledError:
        _errors.print("lockstep: stopped")
        sys.exit(130)
    except SystemExit as end:
        if isinstance(getattr(end.__context__, "__cause__", None), KeyboardInterrupt):  # typer says nothing of it
            _errors.print("lockstep: stopped")
        raise
