"""Prints the output of commands that call a daemon: a run's progress, its logs and the table of all runs."""

import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from lockstep.coordinator.v1 import coordinator_pb2 as pb
from rich.console import Console
from rich.table import Table

from services.common.config.run import Config
from services.common.counted import counted
from services.common.errors import LockstepError, Reason
from services.coordinator.daemon.client import Coordinator
from services.coordinator.daemon.history import from_message, state_name
from services.coordinator.fleet.launch import Addresses
from services.coordinator.observe.console import fitting
from services.coordinator.observe.frontend import Outcome
from services.coordinator.observe.terminal import Terminal
from services.coordinator.rl.session import show_outcome
from services.coordinator.runs.reporter import in_order

_MIN_DIRECTORY = 20  # in columns; a narrower path column would fold a path into too many lines to read


async def start(coordinator: Coordinator, config: Config, addresses: Addresses, console: Console) -> str:
    """Returns the name of the run that it starts."""
    async with coordinator:
        run = await coordinator.start(config, addresses)
    console.print(f"run {run.name} on coordinator {coordinator.address}, in {run.run_dir} on its host", soft_wrap=True)
    return run.name


async def follow(coordinator: Coordinator, name: str, console: Console) -> Outcome:
    """Shows the same table as for a local run until the run ends, then its outcome, which it returns.

    Raises:
        LockstepError: The run failed, or the coordinator is unreachable.
    """
    run, evaluations = pb.Run(), []
    async with coordinator, AsyncExitStack() as stack:
        table = None
        async for answer in coordinator.watch(name):
            run = answer.run
            if table is None:
                table = Terminal(console, run.num_steps)
                stack.callback(table.close)
            if answer.HasField("evaluation"):
                evaluations.append({"version": answer.evaluation.version, **in_order(answer.evaluation.values)})
            _show(answer, table)
    if run.state == pb.RUN_STATE_FAILED:
        reason, _, message = run.error.partition(": ")
        raise LockstepError(f"run {name}: {message}", reason=Reason(reason))
    if run.state == pb.RUN_STATE_STOPPED:
        console.print(f"run {name} was stopped; start it again to resume from its newest checkpoint", soft_wrap=True)
    export_path = Path(run.export_path) if run.export_path else None
    outcome = Outcome(Path(run.run_dir), run.version, run.num_steps, evaluations, export_path)
    show_outcome(outcome, console)
    return outcome


async def print_log(coordinator: Coordinator, name: str, service: str, *, follow: bool) -> None:
    """Writes a log to standard output, byte for byte."""
    async with coordinator:
        async for data in coordinator.read_log(name, service, follow=follow):
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()


async def show_status(coordinator: Coordinator, name: str, console: Console) -> None:
    """Prints a table of the run `name`, or of all runs if it is empty, and their errors."""
    async with coordinator:
        runs = [await coordinator.get(name)] if name else await coordinator.all()
    console.print(_runs_table(runs, console.width))
    for run in runs:
        if run.error:
            console.print(f"{run.name}: {run.error}", soft_wrap=True)


async def stop(coordinator: Coordinator, name: str, console: Console, *, now: bool) -> None:
    """Asks a run to stop and prints its state."""
    async with coordinator:
        run = await coordinator.stop(name, now=now)
    console.print(f"run {name} is {state_name(run)}, with {run.version} of {counted(run.num_steps, 'step')} done")


def _runs_table(runs: Sequence[pb.Run], width: int) -> Table:
    """Builds the table of runs. Names are shown in full so that they can be copied; on a narrow terminal the directory
    is folded or left out.
    """
    head = ("run", "state", "step", "now", "directory")
    lines = [(run.name, state_name(run), f"{run.version} of {run.num_steps}", run.phase, run.run_dir) for run in runs]
    shown = fitting([head, *((*cells[:4], cells[4][:_MIN_DIRECTORY]) for cells in lines)], range(5), width)
    table = Table()
    for index in shown:
        # Only the directory may fold, unless the name alone is wider than the terminal.
        table.add_column(head[index], no_wrap=index < 4 and len(shown) > 1, overflow="fold")
    for cells in lines:
        table.add_row(*(cells[index] for index in shown))
    return table


def _show(answer: pb.WatchRunResponse, table: Terminal) -> None:
    run = answer.run
    if answer.HasField("conversation"):
        table.conversation(answer.step.version, from_message(answer.conversation))
    if answer.HasField("step"):
        table.step(answer.step.version, dict(answer.step.values))
    elif answer.HasField("evaluation"):
        table.evaluation(answer.evaluation.version, dict(answer.evaluation.values))
    table.begin_phase(run.phase if run.state == pb.RUN_STATE_RUNNING else state_name(run), run.version)
