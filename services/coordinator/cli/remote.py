"""Implements the commands that serve or call a coordinator daemon. They import heavy modules only when they run."""

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer
from typing_extensions import Unpack

from services.coordinator.cli.options import Given, addresses, takes_addresses
from services.coordinator.observe.console import literal_console

if TYPE_CHECKING:
    from services.common.config.run import Config
    from services.coordinator.daemon.client import Coordinator
    from services.coordinator.fleet.launch import Addresses

_console = literal_console()
_At = Annotated[
    str,
    typer.Option("--coordinator", envvar="LOCKSTEP_COORDINATOR", help="HOST:PORT of a running coordinator daemon."),
]
_Name = Annotated[str, typer.Argument(metavar="RUN", help="Name of the run.")]
_AS_GIVEN = {"allow_extra_args": True, "ignore_unknown_options": True}


def app() -> typer.Typer:
    """Returns the commands `status`, `watch`, `stop`, `logs` and `coordinator serve`."""
    commands, daemon = typer.Typer(), typer.Typer(no_args_is_help=True, help="Run the coordinator as a daemon.")
    for command in (status, watch, stop, logs):
        commands.command()(takes_addresses()(command))
    daemon.command(context_settings=_AS_GIVEN, add_help_option=False)(serve)
    daemon.callback()(lambda: None)  # without it, typer turns a group's only command into the group itself
    commands.add_typer(daemon, name="coordinator")
    return commands


def run_on_coordinator(at: str, config: "Config", given: "Addresses") -> None:
    """Starts a run on the coordinator at `at` and watches it here: `lockstep run --coordinator`."""
    from services.coordinator.daemon.client import Coordinator
    from services.coordinator.daemon.following import start

    daemon = Coordinator(at, given.transport)
    _watch(daemon, asyncio.run(start(daemon, config, given, _console)))


def status(
    coordinator: _At,
    run: Annotated[str, typer.Argument(help="Name of the run; all runs by default.")] = "",
    **given: Unpack[Given],
) -> None:
    """Show a coordinator's runs."""
    from services.coordinator.daemon.following import show_status

    asyncio.run(show_status(_coordinator(coordinator, given), run, _console))


def watch(run: _Name, coordinator: _At, **given: Unpack[Given]) -> None:
    """Show a run's progress from its first step to its end. Ctrl-C detaches; the run continues."""
    _watch(_coordinator(coordinator, given), run)


def _watch(daemon: "Coordinator", run: str) -> None:
    from services.coordinator.daemon.following import follow

    try:
        asyncio.run(follow(daemon, run, _console))
    except KeyboardInterrupt:
        at = f"{run} --coordinator {daemon.address}"
        for line in (
            "detached; the run continues",
            f"  reattach: lockstep watch {at}",
            f"  stop it:  lockstep stop {at}",
        ):
            _console.print(line, soft_wrap=True, highlight=False)
        raise typer.Exit(130) from None


def stop(
    run: _Name,
    coordinator: _At,
    now: Annotated[bool, typer.Option("--now", help="Stop immediately instead of after the current step.")] = False,
    **given: Unpack[Given],
) -> None:
    """Stop a run after the current step."""
    from services.coordinator.daemon.following import stop as stop_run

    asyncio.run(stop_run(_coordinator(coordinator, given), run, _console, now=now))


def logs(
    run: _Name,
    coordinator: _At,
    service: Annotated[str, typer.Option(help="coordinator, trainer, reward, rollout-0, ...")] = "coordinator",
    follow: Annotated[bool, typer.Option("--follow", help="Keep printing new lines until the run ends.")] = False,
    **given: Unpack[Given],
) -> None:
    """Print a run's log: the coordinator's own, or that of a service it started for the run."""
    from services.coordinator.daemon.following import print_log

    asyncio.run(print_log(_coordinator(coordinator, given), run, service, follow=follow))


def serve(context: typer.Context) -> None:
    """Start the daemon: --listen HOST:PORT [--runs-dir DIR]. --help lists all options."""
    from services.coordinator.daemon.__main__ import main

    main(context.args)


def _coordinator(address: str, given: Given) -> "Coordinator":
    from services.coordinator.daemon.client import Coordinator

    return Coordinator(address, addresses(given, is_operator=True).transport)
