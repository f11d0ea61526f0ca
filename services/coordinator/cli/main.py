"""Implements the `lockstep` command. Subcommands import heavy modules only when they run."""

import asyncio
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer
from typing_extensions import Unpack

from services.common.errors import InvalidInput, LockstepError
from services.common.files import write_whole
from services.common.process import call_loopback_directly, keep_files_private, open_standard_streams
from services.coordinator.cli.groups import groups, run_on_coordinator
from services.coordinator.cli.options import ServiceOptions, addresses_of, takes_addresses
from services.coordinator.cli.output import exit_if_stopped, fail, outliving_output
from services.coordinator.observe.console import literal_console

if TYPE_CHECKING:
    from services.common.config.load import AnyConfig
    from services.coordinator.fleet.launch import Addresses

# Errors are printed by main(), as one line.
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


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


app.add_typer(groups())

_console = literal_console()
_errors = literal_console(stderr=True)


_Configs = Annotated[list[str], typer.Argument(help="YAML files and key=value overrides; later ones win.")]
_RunDir = Annotated[Path, typer.Argument(help="Directory of a run.")]
_DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check model, data and settings, show the first row, and start nothing.")
]


@app.command()
@takes_addresses("rollout", "reward", "trainer", "reference", "critic", "teacher")
def run(
    config: _Configs,
    coordinator: Annotated[
        str, typer.Option(help="HOST:PORT of a coordinator to run on; paths refer to its host.")
    ] = "",
    dry_run: _DryRun = False,
    **options: Unpack[ServiceOptions],
) -> None:
    """Train with RL. Starts services without an address, here or on the coordinator's host; they stop with the run."""
    from services.common.config.load import load
    from services.common.config.run import Config
    from services.coordinator.doctor.inputs import with_checked_models
    from services.coordinator.observe.frontend import TerminalFrontend
    from services.coordinator.rl.session import run_session, show_outcome

    services = addresses_of(options, is_operator=bool(coordinator))
    settings = load(Config, config)
    services.require_own(settings)
    if dry_run:
        _check_only(settings, services, coordinator)
    if coordinator:
        run_on_coordinator(coordinator, settings, services)
        return
    settings = with_checked_models(settings, services)
    with outliving_output(settings.run_dir):
        outcome = asyncio.run(run_session(settings, services, TerminalFrontend(_console)))
    show_outcome(outcome, _console)
    exit_if_stopped(outcome)


@app.command()
@takes_addresses("trainer")
def sft(config: _Configs, dry_run: _DryRun = False, **options: Unpack[ServiceOptions]) -> None:
    """Fine-tune on prompts and responses (SFT). Uses only a trainer, and starts one here if --trainer is not given."""
    from services.common.config.load import load
    from services.common.config.sft import SftConfig
    from services.coordinator.doctor.inputs import with_checked_models
    from services.coordinator.sft import run_session, show_outcome

    services = addresses_of(options)
    settings = load(SftConfig, config)
    if dry_run:
        _check_only(settings, services)
    settings = with_checked_models(settings, services)
    with outliving_output(settings.run_dir):
        outcome = asyncio.run(run_session(settings, services, _console))
    show_outcome(outcome, _console)
    exit_if_stopped(outcome)


@app.command("eval")
@takes_addresses("rollout", "reward", "trainer")
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint of a run, or a Hugging Face model directory.")],
    config: Annotated[
        list[str] | None,
        typer.Argument(help="YAML files and key=value overrides; without a file, the run's own config."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for the results; inside the run's directory by default.")
    ] = None,
    **options: Unpack[ServiceOptions],
) -> None:
    """Evaluate a checkpoint or a model on a run's held-out sets. The run's own files are not changed."""
    from services.coordinator.doctor.inputs import with_checked_models
    from services.coordinator.rl.evaluation import eval_config, eval_session, load_config, show_evaluation

    services = addresses_of(options)
    loaded = load_config(checkpoint, config or [], model_is_remote=bool(services.trainer))
    settings = with_checked_models(eval_config(loaded, checkpoint, out), services)
    with outliving_output(settings.run_dir):
        evaluation = asyncio.run(eval_session(settings, services, _console))
    show_evaluation(evaluation, _console)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint of a run, such as runs/NAME/checkpoints/step-000100.")],
    out: Annotated[Path, typer.Option(help="Directory to write; it must not exist.")],
    config: Annotated[
        list[str] | None, typer.Argument(help="Overrides of the run's config, or its config if it was moved.")
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], typer.Option(help="Data type; auto is as in the starting model.")
    ] = "auto",
) -> None:
    """Write a checkpoint as a Hugging Face model directory, on the CPU; adapters are merged, and also in adapter/."""
    from services.coordinator.cli.export import export, export_config

    _require_new(out)
    settings = export_config(checkpoint, config or [], dtype)
    asyncio.run(export(checkpoint, settings, out))
    _console.print(f"wrote {out}", soft_wrap=True)


@app.command()
def push(
    directory: Annotated[Path, typer.Argument(help="An exported model: runs/NAME/model, or the --out of an export.")],
    repository: Annotated[
        str, typer.Argument(help="OWNER/NAME on the Hugging Face Hub; created if it does not exist.")
    ],
    public: Annotated[
        bool, typer.Option("--public", help="Make a new repository public; otherwise it is private.")
    ] = False,
) -> None:
    """Upload an exported model to the Hugging Face Hub, with the login of `hf auth login` or HF_TOKEN."""
    from services.coordinator.cli.export import push

    _console.print(f"pushed {push(directory, repository, is_public=public)}", soft_wrap=True)


@app.command()
def report(
    run_dir: Annotated[list[Path], typer.Argument(help="Directory of a run; several to compare them here.")],
    out: Annotated[
        Path | None, typer.Option(help="File to write; report.html in the run's directory by default.")
    ] = None,
) -> None:
    """Write an HTML page with a run's curves, samples and failures, or compare several runs in a table."""
    from services.coordinator.observe.report.page import write_report
    from services.coordinator.observe.report.summary import show_comparison

    keep_files_private()
    if len(run_dir) == 1:
        with _console.status("reading the run"):
            path = write_report(run_dir[0], out)
        _console.print(f"wrote {path}", soft_wrap=True)
    elif out:
        raise InvalidInput("--out: a comparison is printed, not written; give one run for a page", field="out")
    else:
        show_comparison(run_dir, _console)


@app.command()
@takes_addresses("reward", "trainer", "critic")
def replay(
    run_dir: _RunDir,
    step: Annotated[int, typer.Option(help="Step to repeat, counted from 1.")],
    what: Annotated[str, typer.Option(help="rewards, train, environment or calls; by default rewards and train.")] = "",
    **options: Unpack[ServiceOptions],
) -> None:
    """Score and train a recorded step again and list the differences. The exit code is 1 if there are any."""
    from services.coordinator.replay.session import parse_what, replay_session, show_replayed

    keep_files_private()
    replayed = asyncio.run(replay_session(run_dir, step, parse_what(what), addresses_of(options), _console))
    show_replayed(replayed, _console)
    raise typer.Exit(1 if replayed.differences else 0)


@app.command()
def verify(run_dir: _RunDir) -> None:
    """Check that the record of a run is possible. Changes nothing; the exit code is 1 if there is a violation."""
    from services.coordinator.verify.session import show_verdict
    from services.coordinator.verify.session import verify as verify_run

    with _console.status("") as status:
        verdict = verify_run(run_dir, lambda text: status.update(f"checking {text}"))
    show_verdict(verdict, run_dir, _console)
    raise typer.Exit(1 if verdict.violation else 0)


@app.command()
@takes_addresses("rollout", "reward", "trainer", "reference", "critic", "teacher")
def doctor(
    config: Annotated[
        list[str] | None,
        typer.Argument(help="The config of the planned run; without one, only the host and services are checked."),
    ] = None,
    **options: Unpack[ServiceOptions],
) -> None:
    """Check this host and running services before a run. Changes nothing; the exit code is 1 if a check fails."""
    from services.common.config.load import load_any
    from services.coordinator.doctor.session import examine

    is_well = examine(load_any(config) if config else None, addresses_of(options), _console)
    raise typer.Exit(0 if is_well else 1)


@app.command()
def init(
    model: Annotated[
        Path, typer.Option(help="The starting model: a directory in the Hugging Face format, or OWNER/NAME on the Hub.")
    ],
    data: Annotated[Path, typer.Option(help="File of prompts with answers: Parquet, JSON Lines, JSON or CSV.")],
    out: Annotated[Path, typer.Option(help="File to write; it must not exist.")] = Path("run.yaml"),
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs to use; by default all of this host.")] = None,
) -> None:
    """Write a config with comments for a model, a file of prompts and the GPUs at hand."""
    from services.coordinator.cli.init import starting_config
    from services.coordinator.clients.gpus import visible_gpus

    _require_new(out)
    num_gpus = len(visible_gpus()) if gpus is None else gpus
    write_whole(out, starting_config(model, data, out, num_gpus=num_gpus))
    _console.print(f"wrote {out}; next: lockstep doctor {out}", soft_wrap=True)


@app.command()
def plan(
    config: _Configs,
    device: Annotated[
        Literal["auto", "cpu", "gpu"], typer.Option(help="Where the ranks compute; auto is as on this host.")
    ] = "auto",
    suggest: Annotated[
        bool, typer.Option("--suggest", help="List the placements that fit the GPUs, and suggest one.")
    ] = False,
    gpus: Annotated[str, typer.Option(help="Suggest for other GPUs than this host's, such as 8x79 (GiB).")] = "",
) -> None:
    """Show each trainer rank's layers and memory and the size of a publication. Starts nothing."""
    from services.common.config.load import load_any
    from services.coordinator.clients.gpus import read_gpus, visible_gpus
    from services.coordinator.data.reading.hub import with_local_models
    from services.coordinator.planning.plan import show_plan
    from services.coordinator.planning.suggest import parse_gpus, show_suggestion

    if suggest or gpus:
        here = [gpu.total_bytes for gpu in read_gpus()] if visible_gpus() and not gpus else []
        show_suggestion(config, parse_gpus(gpus) if gpus else here, _console)
        return
    is_gpu = device == "gpu" or (device == "auto" and bool(visible_gpus()))
    show_plan(with_local_models(load_any(config), has_weights=False), _console, is_gpu=is_gpu)


@app.command()
def config(
    prefix: Annotated[str, typer.Argument(help="List only keys that begin with this, such as trainer.megatron.")] = "",
    sft: Annotated[bool, typer.Option("--sft", help="List the keys of `lockstep sft`.")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print all keys of run and sft as docs/configuration.md.")
    ] = False,
) -> None:
    """List every config key with its type, default and help."""
    from services.common.config.load import keys
    from services.common.config.run import Config
    from services.common.config.sft import SftConfig
    from services.coordinator.cli.config import config_page, keys_with_prefix, show_keys

    if markdown:
        typer.echo(config_page(), nl=False)
        return
    show_keys(keys_with_prefix(prefix, list(keys(SftConfig if sft else Config))), _console)


def _require_new(out: Path) -> None:
    if out.exists():
        raise InvalidInput(f"--out: {out} exists; choose another", field="out")


def _check_only(settings: "AnyConfig", services: "Addresses", coordinator: str = "") -> NoReturn:
    from services.coordinator.doctor.session import examine_run

    if coordinator:
        raise InvalidInput("--dry-run checks this host: run it where the coordinator runs", field="dry_run")
    raise typer.Exit(0 if examine_run(settings, services, _console) else 1)


def main() -> None:
    """Runs the command. An error is printed as one line with exit code 2; an interruption gives exit code 130."""
    open_standard_streams()
    call_loopback_directly()
    try:
        app()
    except (LockstepError, OSError, MemoryError, RuntimeError) as error:
        fail(error)
    except asyncio.CancelledError:
        _errors.print("lockstep: stopped")
        sys.exit(130)
    except SystemExit as end:
        if end.__context__ and isinstance(end.__context__.__cause__, KeyboardInterrupt):  # typer prints nothing for it
            _errors.print("lockstep: stopped")
        raise
