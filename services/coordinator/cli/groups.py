"""Defines the command groups `certs`, `env` and `replicas`. Each command imports what it needs when it runs."""

import asyncio
import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from typing_extensions import Unpack

from services.common.errors import InvalidInput, NotFound
from services.coordinator.cli.options import CoordinatorAddress, ServiceOptions, addresses_of, takes_addresses
from services.coordinator.observe.console import literal_console

if TYPE_CHECKING:
    from lockstep.coordinator.v1 import coordinator_pb2 as pb

    from services.common.rpc.tls import Identity

_console = literal_console()

_AUTHORITY = Path("certs/ca")
_Ca = Annotated[Path, typer.Option(help="Directory of the certificate authority.")]
_Days = Annotated[float, typer.Option(min=1, help="Days until the certificate expires; renew it before then.")]
_Run = Annotated[str, typer.Argument(metavar="RUN", help="Directory of the run; with --coordinator, its name.")]
_Addresses = Annotated[list[str], typer.Argument(metavar="HOST:PORT...", help="Addresses of replicas.")]


def groups() -> dict[str, typer.Typer]:
    """Returns the groups by name. Their commands raise LockstepError."""
    certificates = typer.Typer(help="Create the certificates for mTLS (see docs/security.md).", no_args_is_help=True)
    for command in (init, issue, renew):
        certificates.command()(command)
    environment = typer.Typer(no_args_is_help=True, help="Play a run's environment without a model.")
    environment.callback()(lambda: None)  # typer would make the only command the group itself
    environment.command("try")(try_environment)
    replicas = typer.Typer(no_args_is_help=True, help="List and change the rollout replicas of a run in progress.")
    for name, command in (("list", list_replicas), ("add", add), ("remove", remove)):
        replicas.command(name)(takes_addresses()(command))
    return {"certs": certificates, "env": environment, "replicas": replicas}


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
    from services.coordinator.daemon.client import Coordinator
    from services.coordinator.runs.replicas import change_replicas, listed_replicas, replica_state

    async def on_daemon() -> "list[pb.Replica]":
        async with Coordinator(at, addresses_of(options, is_operator=True).transport) as daemon:
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
