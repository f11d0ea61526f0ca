"""The `lockstep` command. Commands import heavy modules only when they run."""

import asyncio
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typing_extensions import Unpack

from services.common.config.load import keys, load
from services.common.errors import LockstepError
from services.coordinator.cli.certs import app as certs_app
from services.coordinator.cli.data import app as data_app
from services.coordinator.cli.endings import fail, run_to_end
from services.coordinator.cli.options import Given, addresses, takes_addresses
from services.coordinator.cli.remote import app as remote_app
from services.coordinator.cli.remote import run_on_coordinator

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"lockstep {version('lockstep-rl')}")
        raise typer.Exit


@app.callback()
def lockstep(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train language models with reinforcement learning, exactly on-policy."""


app.add_typer(data_app(), name="data")
app.add_typer(certs_app(), name="certs")
app.add_typer(remote_app())

_console = Console()
_errors = Console(stderr=True)


_Configs = Annotated[list[str], typer.Argument(help="YAML files and key=value overrides; later ones win.")]
_RunDir = Annotated[Path, typer.Argument(help="Directory of a run.")]


@app.command()
@takes_addresses("rollout", "reward", "trainer", "reference", "critic")
def run(
    config: _Configs,
    coordinator: Annotated[
        str, typer.Option(help="HOST:PORT of a coordinator to run on; paths refer to its host.")
    ] = "",
    **given: Unpack[Given],
) -> None:
    """Train with RL. Starts services without an address, here or on the coordinator's host; they stop with the run."""
    from services.common.config.run import Config
    from services.coordinator.checks.plan import check_model
    from services.coordinator.observe.frontend import TerminalFrontend
    from services.coordinator.rl.session import run_session, show_outcome

    services = addresses(given, is_operator=True)
    settings = load(Config, config)
    services.require_own(settings)
    if coordinator:
        run_on_coordinator(coordinator, settings, services)
        return
    check_model(settings)
    session = run_session(settings, services, TerminalFrontend(_console))
    show_outcome(run_to_end(session, settings.run_dir), _console)


@app.command()
@takes_addresses("trainer")
def sft(config: _Configs, **given: Unpack[Given]) -> None:
    """Fine-tune on prompts and responses (SFT). Uses only a trainer, and starts one here if --trainer is not given."""
    from services.common.config.sft import SftConfig
    from services.coordinator.checks.plan import check_model
    from services.coordinator.sft.session import run_session, show_outcome

    services, settings = addresses(given), load(SftConfig, config)
    check_model(settings)
    show_outcome(run_to_end(run_session(settings, services, _console), settings.run_dir), _console)


@app.command("eval")
@takes_addresses("rollout", "reward", "trainer")
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint of a run, or a Hugging Face model directory.")],
    config: _Configs,
    out: Annotated[
        Path | None, typer.Option(help="Directory for the results; inside the run's directory by default.")
    ] = None,
    **given: Unpack[Given],
) -> None:
    """Evaluate a checkpoint or a model on a run's held-out sets. The run's own files are not changed."""
    from services.common.config.run import Config
    from services.coordinator.checks.plan import check_model
    from services.coordinator.rl.eval_session import eval_config, eval_session, show_evaluation

    services, settings = addresses(given), eval_config(load(Config, config), checkpoint, out)
    check_model(settings)
    show_evaluation(run_to_end(eval_session(settings, services, _console), settings.run_dir), _console)


@app.command()
def report(
    run_dir: _RunDir,
    out: Annotated[
        Path | None, typer.Option(help="File to write; report.html in the run's directory by default.")
    ] = None,
) -> None:
    """Write an HTML page with a run's curves, samples and failures. It needs no network to view."""
    from services.coordinator.observe.report.page import write_report

    _console.print(f"wrote {write_report(run_dir, out)}", soft_wrap=True)


@app.command()
@takes_addresses("reward", "trainer", "critic")
def replay(
    run_dir: _RunDir,
    step: Annotated[int, typer.Option(help="Step to repeat, counted from 1.")],
    what: Annotated[str, typer.Option(help="rewards, train or environment; by default, rewards and train.")] = "",
    **given: Unpack[Given],
) -> None:
    """Score and train a recorded step again and list the differences. The exit code is 1 if there are any."""
    from services.coordinator.replay.session import parse_what, replay_session, show_replayed

    replayed = asyncio.run(replay_session(run_dir, step, parse_what(what), addresses(given), _console))
    show_replayed(replayed, _console)
    raise typer.Exit(1 if replayed.differences else 0)


@app.command()
@takes_addresses("rollout", "reward", "trainer")
def doctor(
    config: Annotated[
        list[str] | None,
        typer.Argument(help="The config of the planned run; without one, only the host and services are checked."),
    ] = None,
    **given: Unpack[Given],
) -> None:
    """Check this host and running services before a run. Changes nothing; the exit code is 1 if a check fails."""
    from services.common.config.run import Config
    from services.coordinator.checks.doctor.session import examine

    services, settings = addresses(given), load(Config, config) if config else None
    is_well = examine(settings, services, _console)
    raise typer.Exit(0 if is_well else 1)


@app.command()
def plan(
    config: _Configs,
    suggest: Annotated[
        bool, typer.Option("--suggest", help="List the placements that fit the GPUs, and suggest one.")
    ] = False,
    gpus: Annotated[str, typer.Option(help="Suggest for other GPUs than this host's, such as 8x79 (GiB).")] = "",
) -> None:
    """Show each trainer rank's layers and memory and the size of a publication. Starts nothing."""
    from services.common.config.run import Config
    from services.coordinator.checks.nvidia import read_gpus
    from services.coordinator.checks.plan import show_plan
    from services.coordinator.checks.suggest import parse_gpus, show_suggestion

    if suggest or gpus:
        show_suggestion(config, parse_gpus(gpus) if gpus else [gpu.total_bytes for gpu in read_gpus()], _console)
        return
    show_plan(load(Config, config), _console)


@app.command()
def config(
    prefix: Annotated[str, typer.Argument(help="List only keys that begin with this, such as trainer.megatron.")] = "",
    sft: Annotated[bool, typer.Option("--sft", help="List the keys of `lockstep sft`.")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print all keys of run and sft as docs/configuration.md.")
    ] = False,
) -> None:
    """List every config key with its type, default and help."""
    from services.common.config.run import Config
    from services.common.config.sft import SftConfig
    from services.coordinator.cli.config_list import keys_with_prefix, show_keys
    from services.coordinator.cli.config_page import config_page

    if markdown:
        typer.echo(config_page(), nl=False)
        return
    show_keys(keys_with_prefix(prefix, list(keys(SftConfig if sft else Config))), _console)


def main() -> None:
    """Runs the command. An error is printed as one line with exit code 2; an interruption gives exit code 130."""
    try:
        app()
    except (LockstepError, OSError) as error:
        fail(error)
    except asyncio.CancelledError:
        _errors.print("lockstep: stopped")
        sys.exit(130)
    except SystemExit as end:
        if end.__context__ and isinstance(end.__context__.__cause__, KeyboardInterrupt):  # typer prints nothing for it
            _errors.print("lockstep: stopped")
        raise
