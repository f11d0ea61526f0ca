"""Implements `lockstep replicas`, which lists and changes the rollout replicas of a run in progress, here or on a
daemon."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from typing_extensions import Unpack

from services.common.errors import NotFound
from services.coordinator.cli.options import Given, addresses, takes_addresses
from services.coordinator.observe.console import literal_console

if TYPE_CHECKING:
    from services.coordinator.runs.replicas import ListedReplica

_console = literal_console()
_Run = Annotated[str, typer.Argument(metavar="RUN", help="Directory of the run; with --coordinator, its name.")]
_At = Annotated[
    str,
    typer.Option(
        "--coordinator", envvar="LOCKSTEP_COORDINATOR", help="HOST:PORT of the coordinator daemon that has the run."
    ),
]
_Addresses = Annotated[list[str], typer.Argument(metavar="HOST:PORT...", help="Addresses of replicas.")]


def app() -> typer.Typer:
    """Returns the commands `list`, `add` and `remove`."""
    commands = typer.Typer(no_args_is_help=True, help="List and change the rollout replicas of a run in progress.")
    for name, command in (("list", show), ("add", add), ("remove", remove)):
        commands.command(name)(takes_addresses()(command))
    return commands


def show(run: _Run, coordinator: _At = "", **given: Unpack[Given]) -> None:
    """List the replicas of a run in progress."""
    _change(run, coordinator, given)


def add(run: _Run, replicas: _Addresses, coordinator: _At = "", **given: Unpack[Given]) -> None:
    """Add running replicas. They are opened at once and take part from the next publication after that."""
    _change(run, coordinator, given, added=replicas)


def remove(run: _Run, replicas: _Addresses, coordinator: _At = "", **given: Unpack[Given]) -> None:
    """Let replicas leave. They get no new prompts and can be stopped once they are no longer listed."""
    _change(run, coordinator, given, removed=replicas)


def _change(run: str, at: str, given: Given, *, added: Sequence[str] = (), removed: Sequence[str] = ()) -> None:
    from services.coordinator.daemon.client import Coordinator
    from services.coordinator.runs.replicas import change_replicas, listed_replicas

    async def on_daemon() -> "list[ListedReplica]":
        async with Coordinator(at, addresses(given, is_operator=True).transport) as daemon:
            if added or removed:
                return await daemon.change_replicas(run, added, removed)
            return await daemon.replicas(run)

    if not at and not Path(run).is_dir():
        raise NotFound(
            f"{run} is no directory here; for a run of a coordinator, add --coordinator HOST:PORT", field="run"
        )
    if at:
        found = asyncio.run(on_daemon())
    elif added or removed:
        found = change_replicas(Path(run), add=added, remove=removed)
    else:
        found = listed_replicas(Path(run))
    table = Table("replica", "state", "version")
    for replica in found:
        table.add_row(replica.address, replica.state, "" if replica.version is None else str(replica.version))
    _console.print(table)
