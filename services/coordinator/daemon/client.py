"""Calls a coordinator daemon, reconnects when the connection breaks, and prints a run's progress, its logs and the
table of all runs.
"""

import logging
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from lockstep.coordinator.v1 import coordinator_pb2 as pb
from lockstep.coordinator.v1 import coordinator_pb2_grpc
from lockstep.coordinator.v1.coordinator_pb2_grpc import CoordinatorServiceServicer as CoordinatorService
from rich.console import Console
from rich.table import Table

from services.common.config.run import Config
from services.common.errors import DeadlineExceeded, LockstepError, Reason, Unavailable, counted
from services.common.rpc.address import require_secure
from services.common.rpc.client import Answer, Client, Method, Request
from services.common.rpc.tls import LOCAL, Transport
from services.coordinator.daemon.history import state_name
from services.coordinator.fleet.launch import Addresses
from services.coordinator.observe.console import fitting
from services.coordinator.observe.frontend import Outcome
from services.coordinator.observe.terminal import Terminal
from services.coordinator.rl.session import show_outcome
from services.coordinator.runs.reporter import in_order

log = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 30.0
# Timeout of a stream, which is then reopened, so that the daemon does not hold resources forever for a client that
# disappeared. Keepalive detects a dead peer much earlier.
_STREAM_TIMEOUT_S = 3600.0
# How long to wait for a restarted daemon.
_RECONNECT_TIMEOUT_S = 60.0


class Coordinator:
    """Calls the daemon at `address`; use it as an async context manager. Raises the daemon's errors unchanged.

    Raises:
        InvalidInput: The address is not HOST:PORT, or the connection would be plaintext over a network.
    """

    _client: Client

    def __init__(self, address: str, transport: Transport = LOCAL):
        require_secure(address, transport, field="--coordinator")
        self.address, self._transport = address, transport

    async def __aenter__(self) -> "Coordinator":
        self._client = Client(self.address, coordinator_pb2_grpc.CoordinatorServiceStub, self._transport)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def start(self, config: Config, addresses: Addresses) -> pb.Run:
        """Starts a run in the coordinator's runs directory; `config.runs_dir` must be unset or that directory."""
        services = pb.ServiceAddresses(rollout=addresses.rollout, reward=addresses.reward, **addresses.trainers)
        request = pb.StartRunRequest(config_json=config.model_dump_json(), addresses=services)
        return (await self._call(CoordinatorService.StartRun, request)).run

    async def get(self, name: str) -> pb.Run:
        return (await self._call(CoordinatorService.GetRun, pb.GetRunRequest(name=name))).run

    async def all(self) -> list[pb.Run]:
        return list((await self._call(CoordinatorService.ListRuns, pb.ListRunsRequest())).runs)

    async def stop(self, name: str, *, now: bool) -> pb.Run:
        """Asks a run to stop. Returns without waiting for its end."""
        return (await self._call(CoordinatorService.StopRun, pb.StopRunRequest(name=name, now=now))).run

    async def replicas(self, name: str) -> list[pb.Replica]:
        answer = await self._call(CoordinatorService.ListReplicas, pb.ListReplicasRequest(name=name))
        return list(answer.replicas)

    async def change_replicas(self, name: str, add: Sequence[str], remove: Sequence[str]) -> list[pb.Replica]:
        """Adds and removes replicas of a run in progress. Returns all of them."""
        request = pb.ChangeReplicasRequest(name=name, add=add, remove=remove)
        return list((await self._call(CoordinatorService.ChangeReplicas, request)).replicas)

    async def watch(self, name: str) -> AsyncIterator[pb.WatchRunResponse]:
        """Yields each event of a run once, from its first step to its end. Reconnects if the connection breaks."""
        step, evaluation = 0, -1  # the newest versions whose events were yielded

        def events() -> AsyncIterator[pb.WatchRunResponse]:
            request = pb.WatchRunRequest(name=name, after_version=step)
            return self._client.stream(CoordinatorService.WatchRun, request, timeout_s=_STREAM_TIMEOUT_S)

        async for answer in self._reconnecting(name, events):
            if answer.HasField("step"):
                step = answer.step.version
            elif answer.HasField("evaluation"):
                # After a reconnect those of the newest step come again: they follow its event.
                if answer.evaluation.version <= evaluation:
                    continue
                evaluation = answer.evaluation.version
            yield answer

    async def read_log(self, name: str, service: str, *, follow: bool) -> AsyncIterator[bytes]:
        """Yields a run's log from the beginning; with `follow`, until the run ends. Reconnects like `watch`."""
        offset = 0

        def parts() -> AsyncIterator[pb.ReadLogResponse]:
            request = pb.ReadLogRequest(name=name, service=service, offset=offset, follow=follow)
            return self._client.stream(CoordinatorService.ReadLog, request, timeout_s=_STREAM_TIMEOUT_S)

        async for part in self._reconnecting(name, parts):
            offset = part.next_offset
            yield part.data

    async def _reconnecting(self, name: str, stream: Callable[[], AsyncIterator[Answer]]) -> AsyncIterator[Answer]:
        """Yields what `stream` does, which goes on where it was when it is called again after a lost connection."""
        await self.get(name)  # raises immediately if the name or address is wrong
        while True:
            try:
                async for answer in stream():
                    yield answer
                return
            except (Unavailable, DeadlineExceeded) as error:
                await self._wait_until_back(name, error)

    async def _call(self, method: Method[Request, Answer], request: Request) -> Answer:
        return await self._client.call(method, request, timeout_s=_CALL_TIMEOUT_S)

    async def _wait_until_back(self, name: str, error: LockstepError) -> None:
        """Waits until the daemon answers again."""
        log.info("%s; waiting for the coordinator to come back", error.message)
        request, limit_s = pb.GetRunRequest(name=name), _RECONNECT_TIMEOUT_S
        call = partial(self._client.call, CoordinatorService.GetRun, request, timeout_s=limit_s, wait_for_ready=True)
        try:
            try:
                await call()
            except Unavailable:  # it may have been sent on the lost connection, before gRPC knew that it is lost
                await call()
        except (Unavailable, DeadlineExceeded) as lost:
            message = f"lost the coordinator at {self.address}, and it did not come back within {limit_s:g} s"
            raise Unavailable(message) from lost


_MIN_DIRECTORY = 20  # in columns; a narrower path column would fold a path into too many lines to read


async def start(coordinator: Coordinator, config: Config, addresses: Addresses, console: Console) -> str:
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
        table.conversation(answer.step.version, answer.conversation)
    if answer.HasField("step"):
        table.step(answer.step.version, dict(answer.step.values))
    elif answer.HasField("evaluation"):
        table.evaluation(answer.evaluation.version, dict(answer.evaluation.values))
    table.begin_phase(run.phase if run.state == pb.RUN_STATE_RUNNING else state_name(run), run.version)
