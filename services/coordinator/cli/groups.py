"""Defines the groups of commands, and the commands that call a coordinator daemon.

Each command imports what it needs when it runs.
"""

import asyncio
import datetime
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table
from typing_extensions import Unpack

from services.common.errors import InvalidInput, NotFound, counted
from services.coordinator.cli.options import CoordinatorAddress, ServiceOptions, addresses_of, takes_addresses
from services.coordinator.cli.output import exit_if_stopped
from services.coordinator.data.formats import FORMATS, ConversionOptions, Format, Split
from services.coordinator.observe.console import literal_console

if TYPE_CHECKING:
    from lockstep.coordinator.v1 import coordinator_pb2 as pb

    from services.common.config.run import Config
    from services.common.rpc.tls import Identity
    from services.coordinator.daemon.client import Coordinator
    from services.coordinator.data.prepare import ConversionReport
    from services.coordinator.fleet.launch import Addresses

_console = literal_console()

_AUTHORITY = Path("certs/ca")
_Ca = Annotated[Path, typer.Option(help="Directory of the certificate authority.")]
_Days = Annotated[float, typer.Option(min=1, help="Days until the certificate expires; renew it before then.")]
_Run = Annotated[str, typer.Argument(metavar="RUN", help="Directory of the run; with --coordinator, its name.")]
_Addresses = Annotated[list[str], typer.Argument(metavar="HOST:PORT...", help="Addresses of replicas.")]
_Name = Annotated[str, typer.Argument(metavar="RUN", help="Name of the run.")]
_AS_GIVEN = {"allow_extra_args": True, "ignore_unknown_options": True}

_DEFAULTS = ConversionOptions()

_BadRows = Annotated[Literal["fail", "drop"], typer.Option(help="Fail on rows that cannot be converted, or drop them.")]
_Out = Annotated[Path, typer.Option(help="Directory to write train.parquet and test.parquet to.")]


def groups() -> typer.Typer:
    """Returns the groups, and the commands `status`, `watch`, `stop` and `logs`. They raise LockstepError."""
    data = typer.Typer(help="Create prompt files from public datasets.", no_args_is_help=True)
    for format in FORMATS.values():
        data.command(format.name, help=f"Convert {format.hub_id}.")(_converter(format))
    for name, command in (("arithmetic", arithmetic), ("reasoning-gym", reasoning_gym), ("search-r1", search_r1)):
        data.command(name)(command)
    certificates = typer.Typer(help="Create the certificates for mTLS (see docs/security.md).", no_args_is_help=True)
    for command in (init, issue, renew):
        certificates.command()(command)
    environment = typer.Typer(no_args_is_help=True, help="Play a run's environment without a model.")
    environment.callback()(lambda: None)  # without it, typer turns a group's only command into the group itself
    environment.command("try")(try_environment)
    replicas = typer.Typer(no_args_is_help=True, help="List and change the rollout replicas of a run in progress.")
    for name, command in (("list", list_replicas), ("add", add), ("remove", remove)):
        replicas.command(name)(takes_addresses()(command))
    daemon = typer.Typer(no_args_is_help=True, help="Run the coordinator as a daemon.")
    daemon.command(context_settings=_AS_GIVEN, add_help_option=False)(serve)
    daemon.callback()(lambda: None)
    commands = typer.Typer()
    for command in (status, watch, stop, logs):
        commands.command()(takes_addresses()(command))
    named = {"data": data, "certs": certificates, "env": environment, "replicas": replicas, "coordinator": daemon}
    for name, group in named.items():
        commands.add_typer(group, name=name)
    return commands


def _converter(format: Format) -> Callable[..., None]:
    def command(
        out: _Out,
        source: Annotated[
            str, typer.Option(help="File, directory, or dataset id on the Hugging Face Hub.")
        ] = format.hub_id,
        revision: Annotated[
            str | None, typer.Option(help="Commit, tag or branch of the dataset on the Hub.")
        ] = _DEFAULTS.revision,
        bad_rows: _BadRows = _DEFAULTS.bad_rows,
        test_size: Annotated[
            int, typer.Option(min=0, help="Number of problems to hold out if the source has no test split; 0 for none.")
        ] = _DEFAULTS.test_size,
        instruction: Annotated[str, typer.Option(help="Text to append to each problem.")] = format.instruction,
    ) -> None:
        from services.coordinator.data.prepare import convert

        options = ConversionOptions(bad_rows, test_size, instruction, revision)
        _show_report(convert(format, source, out, options))

    return command


def arithmetic(
    out: _Out = Path("data/arithmetic"),  # where the configs of deploy/runs look for it
    num_train: Annotated[int, typer.Option(min=1, help="Rows of train.parquet.")] = 10_000,
    num_test: Annotated[int, typer.Option(min=1, help="Rows of test.parquet.")] = 256,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same files.")] = 0,
) -> None:
    """Generate the quickstart's task: additions and subtractions of numbers up to 99."""
    from services.coordinator.data.prepare import make_arithmetic

    _show_report(make_arithmetic(num_rows={"train": num_train, "test": num_test}, seed=seed, out=out))


def reasoning_gym(
    out: _Out,
    task: Annotated[str, typer.Option(help="Name of the task, such as chain_sum.")],
    num_rows: Annotated[int, typer.Option(min=1, help="Rows of train.parquet.")] = 10_000,
    num_test: Annotated[int, typer.Option(min=0, help="Rows of test.parquet; 0 for none.")] = 256,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="The same seed gives the same files.")] = 0,
    settings: Annotated[str, typer.Option(help="Settings of the task, as a JSON object.")] = "{}",
) -> None:
    """Generate tasks of reasoning-gym for `environment: {kind: reasoning_gym}` (extra: environments)."""
    from services.coordinator.data.prepare import make_files, parse_settings

    sizes: dict[Split, int] = {"train": num_rows, "test": num_test} if num_test else {"train": num_rows}
    _show_report(make_files(task, parse_settings(settings), num_rows=sizes, seed=seed, out=out))


def search_r1(
    questions: Annotated[Path, typer.Option(help="File of questions: question and a list or text of answers.")],
    corpus: Annotated[Path, typer.Option(help="File of documents: text and optionally title, or contents.")],
    out: Annotated[Path, typer.Option(help="Directory to write train.parquet, corpus.parquet and the test to.")],
    test_questions: Annotated[Path | None, typer.Option(help="File of questions for test.parquet.")] = None,
    bad_rows: _BadRows = _DEFAULTS.bad_rows,
) -> None:
    """Convert Search-R1's questions and documents, in any form that a run reads, for episodes with a search."""
    from services.coordinator.data.prepare import make_search_files

    files: dict[Split, Path] = {"train": questions, **({"test": test_questions} if test_questions else {})}
    _show_report(make_search_files(files, corpus, out, bad_rows))


def _show_report(report: "ConversionReport") -> None:
    from services.coordinator.data.reading.record import NUM_NAMED

    console = literal_console(soft_wrap=True, highlight=False)
    console.print(f"{report.dataset} from {report.source}")
    for name, path in report.files.items():
        held_out = ", held out of train" if name == "test" and report.num_held_out else ""
        console.print(f"  {name:<6} {report.num_rows[name]:>6} rows  {path}{held_out}")
    if report.dropped:
        console.print(f"  dropped {counted(len(report.dropped), 'bad row')}:")
    for place in report.dropped[:NUM_NAMED]:
        console.print(f"    {place}")


def init(directory: Annotated[Path, typer.Argument(help="Directory to create.")] = _AUTHORITY) -> None:
    """Create a certificate authority that is valid for ten years. Keep its private key on this host."""
    from services.coordinator.cli import certs

    certs.init(directory)
    line = f"created an authority in {directory}; keep {directory / certs.CA_KEY_FILE} secret and on this host"
    _console.print(line, soft_wrap=True, highlight=False)


def issue(
    role: Annotated[str, typer.Argument(help="coordinator, rollout, trainer, reward or operator.")],
    out: Annotated[Path, typer.Option(help="Directory to create; pass it to --tls.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="DNS name or IP address that clients use to reach the process; repeat for more."),
    ] = None,
    ca: _Ca = _AUTHORITY,
    days: _Days = 90,
) -> None:
    """Create the credentials of one process: ca.pem, cert.pem and key.pem."""
    from services.common.rpc.tls import Role
    from services.coordinator.cli import certs

    if role not in list(Role):
        raise InvalidInput(f"unknown role {role!r}; the roles are {', '.join(Role)}", field="role")
    _show_identity(certs.issue(ca, Role(role), host or [], out, validity=datetime.timedelta(days=days)), out)


def renew(
    directory: Annotated[Path, typer.Argument(help="Directory that `issue` created.")],
    ca: _Ca = _AUTHORITY,
    days: _Days = 90,
) -> None:
    """Replace a certificate and its key. Processes that use them keep running and switch to the new ones."""
    from services.coordinator.cli import certs

    _show_identity(certs.renew(ca, directory, validity=datetime.timedelta(days=days)), directory)


def _show_identity(identity: "Identity", directory: Path) -> None:
    hosts = ", ".join(identity.hosts) or "no host"
    line = f"{directory}: {', '.join(identity.roles)} at {hosts}, until {identity.expires:%Y-%m-%d %H:%M} UTC"
    _console.print(line, soft_wrap=True, highlight=False)


def try_environment(
    config: Annotated[list[str], typer.Argument(help="YAML files and key=value overrides; later ones win.")],
    row: Annotated[
        int, typer.Option(min=0, help="Row of the training data, counted from 0: 17 for prompt 17-9f2c41d0.")
    ] = 0,
    policy_text: Annotated[
        list[str] | None, typer.Option(help="A turn of the policy; repeat it for more. Otherwise you are asked.")
    ] = None,
    replies: Annotated[
        Path | None, typer.Option(help="File with a turn in each line; a line may be JSON text, for line breaks.")
    ] = None,
    tls: Annotated[
        Path | None, typer.Option(help="For an agent on another host: directory with a reward service's certificate.")
    ] = None,
    listen: Annotated[
        str, typer.Option(help="For an agent on another host: address of this host that it can reach, without a port.")
    ] = "127.0.0.1",
) -> None:
    """Play one row: show the messages, take the policy's turns from you, and show replies, rewards and the end.

    The scorers of the run are not asked. The exit code is 1 if the environment fails.
    """
    from services.common.config.load import load
    from services.common.config.run import Config
    from services.coordinator.cli.environment import play_row, read_lines, typed_lines

    settings = load(Config, config)
    texts = [*(policy_text or []), *(read_lines(replies) if replies else [])]
    turns = iter(texts) if policy_text or replies else typed_lines(_console)
    place = {"host": listen, "tls": str(tls) if tls else ""}
    raise typer.Exit(0 if play_row(settings, row, turns, _console, place) else 1)


def list_replicas(run: _Run, coordinator: CoordinatorAddress = "", **options: Unpack[ServiceOptions]) -> None:
    """List the replicas of a run in progress."""
    _change(run, coordinator, options)


def add(
    run: _Run, replicas: _Addresses, coordinator: CoordinatorAddress = "", **options: Unpack[ServiceOptions]
) -> None:
    """Add running replicas. They are opened at once and take part from the next publication after that."""
    _change(run, coordinator, options, added=replicas)


def remove(
    run: _Run, replicas: _Addresses, coordinator: CoordinatorAddress = "", **options: Unpack[ServiceOptions]
) -> None:
    """Let replicas leave. They get no new prompts and can be stopped once they are no longer listed."""
    _change(run, coordinator, options, removed=replicas)


def _change(
    run: str, at: str, options: ServiceOptions, *, added: Sequence[str] = (), removed: Sequence[str] = ()
) -> None:
    from services.coordinator.runs.replicas import change_replicas, listed_replicas, replica_state

    async def on_daemon() -> "list[pb.Replica]":
        async with _coordinator(at, options) as daemon:
            if added or removed:
                return await daemon.change_replicas(run, added, removed)
            return await daemon.replicas(run)

    if at:
        listed = asyncio.run(on_daemon())
    elif not Path(run).is_dir():
        message = f"{run} is no directory here; for a run of a coordinator, add --coordinator HOST:PORT"
        raise NotFound(message, field="run")
    elif added or removed:
        listed = change_replicas(Path(run), add=added, remove=removed)
    else:
        listed = listed_replicas(Path(run))
    has_notes = any(replica.note for replica in listed)
    table = Table("replica", "state", "version", *["note"] * has_notes)
    for replica in listed:
        version = str(replica.version) if replica.HasField("version") else ""
        table.add_row(replica.address, replica_state(replica), version, *[replica.note] * has_notes)
    _console.print(table)


def run_on_coordinator(at: str, config: "Config", addresses: "Addresses") -> None:
    """Starts a run on the coordinator at `at` and watches it here: `lockstep run --coordinator`."""
    from services.coordinator.daemon.client import Coordinator, start

    daemon = Coordinator(at, addresses.transport)
    _watch(daemon, asyncio.run(start(daemon, config, addresses, _console)))


def status(
    coordinator: CoordinatorAddress,
    run: Annotated[str, typer.Argument(help="Name of the run; all runs by default.")] = "",
    **options: Unpack[ServiceOptions],
) -> None:
    """Show a coordinator's runs."""
    from services.coordinator.daemon.client import show_status

    asyncio.run(show_status(_coordinator(coordinator, options), run, _console))


def watch(run: _Name, coordinator: CoordinatorAddress, **options: Unpack[ServiceOptions]) -> None:
    """Show a run's progress from its first step to its end. Ctrl-C detaches; the run continues."""
    _watch(_coordinator(coordinator, options), run)


def _watch(daemon: "Coordinator", run: str) -> None:
    from services.coordinator.daemon.client import follow

    try:
        exit_if_stopped(asyncio.run(follow(daemon, run, _console)))
    except KeyboardInterrupt:
        at = f"{run} --coordinator {daemon.address}"
        lines = f"detached; the run continues\n  reattach: lockstep watch {at}\n  stop it:  lockstep stop {at}"
        _console.print(lines, soft_wrap=True, highlight=False)
        raise typer.Exit(130) from None


def stop(
    run: _Name,
    coordinator: CoordinatorAddress,
    now: Annotated[bool, typer.Option("--now", help="Stop immediately instead of after the current step.")] = False,
    **options: Unpack[ServiceOptions],
) -> None:
    """Stop a run after the current step."""
    from services.coordinator.daemon.client import stop as stop_run

    asyncio.run(stop_run(_coordinator(coordinator, options), run, _console, now=now))


def logs(
    run: _Name,
    coordinator: CoordinatorAddress,
    service: Annotated[str, typer.Option(help="coordinator, trainer, reward, rollout-0, ...")] = "coordinator",
    follow: Annotated[bool, typer.Option("--follow", help="Keep printing new lines until the run ends.")] = False,
    **options: Unpack[ServiceOptions],
) -> None:
    """Print a run's log: the coordinator's own, or that of a service it started for the run."""
    from services.coordinator.daemon.client import print_log

    asyncio.run(print_log(_coordinator(coordinator, options), run, service, follow=follow))


def serve(context: typer.Context) -> None:
    """Start the daemon: --listen HOST:PORT [--runs-dir DIR]. --help lists all options."""
    from services.coordinator.daemon.__main__ import main

    main(context.args)


def _coordinator(address: str, options: ServiceOptions) -> "Coordinator":
    from services.coordinator.daemon.client import Coordinator

    return Coordinator(address, addresses_of(options, is_operator=True).transport)
