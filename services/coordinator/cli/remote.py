"""Implements the commands that serve or call a coordinator daemon. They import heavy modules only when they run."""

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer
from typing_extensions import Unpack

from services.coordinator.cli.options import CoordinatorAddress, ServiceOptions, addresses_of, takes_addresses
from services.coordinator.cli.output import exit_if_stopped
from services.coordinator.observe.console import literal_console

if TYPE_CHECKING:
    from services.common.config.run import Config
    from services.coordinator.daemon.client import Coordinator
    from services.coordinator.fleet.launch import Addresses

_console = literal_console()
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
