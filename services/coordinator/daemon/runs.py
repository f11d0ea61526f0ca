"""Manages all runs of a daemon: those in progress, those that ended in this process, and those found in its directory.
Implements CoordinatorService, the gRPC interface for the CLI and dashboards.
"""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

from lockstep.coordinator.v1 import coordinator_pb2 as pb
from lockstep.coordinator.v1 import coordinator_pb2_grpc

from services.common.config.load import parse_json
from services.common.config.run import Config
from services.common.errors import (
    InvalidInput,
    LockstepError,
    NotFound,
    PreconditionFailed,
    Unavailable,
    counted,
    described,
)
from services.common.rpc.address import require_secure
from services.common.rpc.server import NO_RUN, Context, service_info
from services.common.rpc.tls import LOCAL, Transport
from services.common.tasks import keep
from services.coordinator.clients.gpus import visible_gpus
from services.coordinator.daemon.history import Event, event_of, logging_to, read_events, read_log, read_run, state_name
from services.coordinator.doctor.inputs import with_checked_models
from services.coordinator.fleet.launch import Addresses, started_ranks, starts_replicas
from services.coordinator.observe.frontend import Outcome
from services.coordinator.rl.session import load_data, run_session
from services.coordinator.runs.replicas import change_replicas, listed_replicas
from services.coordinator.runs.reporter import Reporter
from services.coordinator.runs.run import Run

log = logging.getLogger(__name__)


class RunInProgress(Reporter):
    """Serves as frontend of a session in this process, and as its reporter once the training loop starts.

    Each watcher reads an append-only list of events at its own pace, so a slow watcher never delays the run.
    """

    console = None
    shows_samples = True

    def __init__(self, config: Config, addresses: Addresses):
        self.config, self.addresses = config, addresses
        self.state = pb.Run(
            name=config.name, state=pb.RUN_STATE_STARTING, num_steps=config.num_steps, run_dir=str(config.run_dir)
        )
        self.ended = asyncio.Event()
        self._events: list[Event] = []
        self._changed = asyncio.Event()
        self._conversation: tuple[int, pb.Conversation] | None = None
        self._run: Run | None = None
        self._session = asyncio.create_task(self._run_session(), name=f"run {config.name}")

    async def end(self) -> None:
        """Waits until the run has finished, stopped or failed, and sets `state` accordingly. Never raises."""
        await asyncio.wait([self._session])
        if self._session.cancelled():
            self.state.state = pb.RUN_STATE_STOPPED
        elif error := self._session.exception():
            self.state.state = pb.RUN_STATE_FAILED
            self.state.error = "{}: {}".format(*described(error))
        else:
            outcome = self._session.result()
            self.state.version, self.state.num_steps = outcome.version, outcome.num_steps
            self.state.state = pb.RUN_STATE_STOPPED if outcome.is_stopped else pb.RUN_STATE_FINISHED
            self.state.export_path = str(outcome.export_path or "")
        self.state.phase = ""
        self.ended.set()
        self._notify()

    def stop(self, *, now: bool) -> None:
        """Stops the run after the current step, or immediately if `now` is set or the loop has not started."""
        self.state.state = pb.RUN_STATE_STOPPING
        self._notify()
        is_open = self._run is not None and not self._run.is_closed
        if self._run is not None:
            self._run.stopping = True
        if now or not is_open:  # only the loop looks at `stopping`, between steps
            self._session.cancel()

    async def events(self, after: int) -> AsyncIterator[pb.WatchRunResponse]:
        """Yields all events after version `after`, and the state whenever it has changed, until the run ends."""
        sent, index = pb.Run(), 0
        while True:
            changed = self._changed
            while index < len(self._events):
                event, index = self._events[index], index + 1
                if not event.is_news(after):
                    continue
                sent.CopyFrom(self.state)
                answer = event.with_state(self.state)
                if self._conversation and answer.step.version == self._conversation[0]:
                    answer.conversation.CopyFrom(self._conversation[1])
                yield answer
            if sent != self.state:
                sent.CopyFrom(self.state)
                yield pb.WatchRunResponse(run=self.state)
            elif self.ended.is_set():
                return
            else:
                await changed.wait()

    def start(self) -> None:
        pass

    def say(self, line: str) -> None:
        log.info(line)

    def begin(self, run: Run, version: int) -> Reporter:
        self._run = run
        self._events = read_events(Path(self.state.run_dir), up_to=version)
        self.state.run_id, self.state.version = run.run_id, version
        if self.state.state == pb.RUN_STATE_STARTING:
            self.state.state = pb.RUN_STATE_RUNNING
        self._notify()
        return self

    def begin_phase(self, name: str, version: int) -> None:
        self.state.phase = name
        self._notify()

    def step(self, version: int, metrics: dict[str, float]) -> None:
        self.state.version = version
        self._events.append(event_of(version, metrics, is_step=True))
        self._notify()

    def conversation(self, version: int, conversation: pb.Conversation) -> None:
        self._conversation = version, conversation

    def evaluation(self, version: int, metrics: dict[str, float]) -> None:
        self._events.append(event_of(version, metrics, is_step=False))
        self._notify()

    def _notify(self) -> None:
        # Each watcher waits for the event that it took before it read the state, so that it misses no change.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _run_session(self) -> Outcome:
        with logging_to(self.config):
            try:
                # Both take seconds or more; in a thread they block neither the event loop nor the other runs.
                self.config = await asyncio.to_thread(with_checked_models, self.config, self.addresses)
                data = await asyncio.to_thread(load_data, self.config, self.addresses)
                outcome = await run_session(self.config, self.addresses, self, data)
                if self._run is None:  # it was finished before, and the loop has not begun
                    self._events = read_events(Path(self.state.run_dir), up_to=outcome.version)
                return outcome
            except Exception as error:
                log.error("run %s failed: %s", self.config.name, error, exc_info=not isinstance(error, LockstepError))
                raise


_UNSET = Config.model_fields["runs_dir"].default


class Runs:
    """Runs by name, each in its subdirectory of `directory`."""

    def __init__(self, directory: Path):
        self.directory = directory.absolute()
        self.running: dict[str, RunInProgress] = {}
        self.is_ending = False
        self._ended: dict[str, pb.Run] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, config: Config, addresses: Addresses) -> pb.Run:
        """Starts or resumes the run of `config`, according to `config.resume`.

        Raises:
            PreconditionFailed: A run of this name is in progress, or another run uses this host's GPUs.
            InvalidInput: `config.runs_dir` is not this coordinator's runs directory.
            Unavailable: The coordinator is shutting down.
        """
        if self.is_ending:
            raise Unavailable("this coordinator is shutting down and starts no runs; try again after its restart")
        if config.name in self.running:
            raise PreconditionFailed(
                f"run {config.name} is in progress: watch it, stop it, or use another name", run=config.name
            )
        if config.runs_dir.absolute() != self.directory and config.runs_dir != _UNSET:
            raise InvalidInput(
                f"runs_dir: this coordinator keeps its runs in {self.directory}; do not set runs_dir", field="runs_dir"
            )
        self._require_gpus(config, addresses)
        in_progress = RunInProgress(config.model_copy(update={"runs_dir": self.directory}), addresses)
        self.running[config.name] = in_progress
        keep(self._tasks, self._finish(in_progress))
        return in_progress.state

    async def get(self, name: str) -> pb.Run:
        """Returns the state of a run.

        Raises:
            NotFound: There is no such run.
        """
        if name in self.running:
            return self.running[name].state
        run = self._newest(name, next(iter(await asyncio.to_thread(_read_runs, self.directory, name)), None))
        if run is None:
            message = f"there is no run {name} in {self.directory}; `lockstep status` lists all runs"
            raise NotFound(message, field="name")
        return run

    async def all(self) -> list[pb.Run]:
        runs = {run.name: run for run in await asyncio.to_thread(_read_runs, self.directory)}
        runs |= {name: self._newest(name, runs.get(name)) or ended for name, ended in self._ended.items()}
        runs |= {name: in_progress.state for name, in_progress in self.running.items()}
        return [runs[name] for name in sorted(runs)]

    def _newest(self, name: str, recorded: pb.Run | None) -> pb.Run | None:
        """Returns the state of a run that is not in progress here: what this daemon knows, or what was `recorded` since
        by another process."""
        ended = self._ended.get(name)
        return recorded if ended is None or (recorded and recorded.version > ended.version) else ended

    async def stop(self, name: str, *, now: bool) -> pb.Run:
        """Asks the run `name` to stop and returns its state. Does nothing if the run has ended."""
        if name not in self.running:
            return await self.get(name)
        self.running[name].stop(now=now)
        return self.running[name].state

    async def drain(self) -> None:
        """Stops all runs after their current steps, or immediately on a second signal."""
        self.is_ending = True
        if not self._tasks:
            return
        what = counted(len(self._tasks), "run")
        log.info("stopping %s after the current step; send the signal again to stop now", what)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop_all, True)
        self._stop_all(False)
        await asyncio.wait(set(self._tasks))

    def _stop_all(self, now: bool) -> None:
        for in_progress in self.running.values():
            in_progress.stop(now=now)

    async def _finish(self, in_progress: RunInProgress) -> None:
        name = in_progress.config.name
        log.info("run %s started", name)
        await in_progress.end()
        del self.running[name]
        self._ended[name] = in_progress.state
        error = f": {in_progress.state.error}" if in_progress.state.error else ""
        log.info("run %s %s%s", name, state_name(in_progress.state), error)

    def _require_gpus(self, config: Config, addresses: Addresses) -> None:
        holder = next(
            (name for name, in_progress in self.running.items() if _starts(in_progress.config, in_progress.addresses)),
            None,
        )
        if holder and visible_gpus() and _starts(config, addresses):
            raise PreconditionFailed(
                f"run {holder} has started services on the GPUs of this host: give the addresses of running services, "
                "or start this run after that one ends"
            )


def _starts(config: Config, addresses: Addresses) -> bool:
    """Returns whether the run starts a service that needs a GPU on this host."""
    return starts_replicas(config, addresses) or bool(started_ranks(config, addresses))


def _read_runs(directory: Path, name: str | None = None) -> list[pb.Run]:
    """Reads all runs in `directory`, or only `name`, which is compared with existing names and never part of a path."""
    entries = (path for path in directory.iterdir() if path.name != "lost+found") if directory.is_dir() else ()
    runs = (read_run(entry) for entry in entries if name is None or entry.name == name)
    return [run for run in runs if run is not None]


NAME = "lockstep.coordinator.v1.CoordinatorService"


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Serves `runs` over gRPC; the runs call their services over `transport`."""

    def __init__(self, runs: Runs, transport: Transport = LOCAL):
        self._runs, self._transport = runs, transport

    async def GetInfo(self, request: pb.GetInfoRequest, context: Context) -> pb.GetInfoResponse:
        state = "ending" if self._runs.is_ending else "serving"
        info = service_info("coordinator", state, run=NO_RUN, libraries=("grpcio", "pyarrow"))
        return pb.GetInfoResponse(info=info, runs_dir=str(self._runs.directory), num_running=len(self._runs.running))

    async def StartRun(self, request: pb.StartRunRequest, context: Context) -> pb.StartRunResponse:
        config, addresses = parse_json(Config, request.config_json), _addresses(request.addresses, self._transport)
        addresses.require_own(config)
        # Of models on the Hub only small files are fetched: a call must not take long.
        await asyncio.to_thread(with_checked_models, config, addresses, has_weights=False)
        return pb.StartRunResponse(run=self._runs.start(config, addresses))

    async def GetRun(self, request: pb.GetRunRequest, context: Context) -> pb.GetRunResponse:
        return pb.GetRunResponse(run=await self._runs.get(request.name))

    async def ListRuns(self, request: pb.ListRunsRequest, context: Context) -> pb.ListRunsResponse:
        return pb.ListRunsResponse(runs=await self._runs.all())

    async def WatchRun(self, request: pb.WatchRunRequest, context: Context) -> AsyncIterator[pb.WatchRunResponse]:
        in_progress = self._runs.running.get(request.name)
        if in_progress is not None:
            async for answer in in_progress.events(request.after_version):
                yield answer
            return
        run = await self._runs.get(request.name)
        for event in await asyncio.to_thread(read_events, Path(run.run_dir)):
            if event.is_news(request.after_version):
                yield event.with_state(run)
        yield pb.WatchRunResponse(run=run)

    async def StopRun(self, request: pb.StopRunRequest, context: Context) -> pb.StopRunResponse:
        return pb.StopRunResponse(run=await self._runs.stop(request.name, now=request.now))

    async def ListReplicas(self, request: pb.ListReplicasRequest, context: Context) -> pb.ListReplicasResponse:
        listed = await asyncio.to_thread(listed_replicas, await self._directory(request.name))
        return pb.ListReplicasResponse(replicas=listed)

    async def ChangeReplicas(self, request: pb.ChangeReplicasRequest, context: Context) -> pb.ChangeReplicasResponse:
        for address in request.add:
            require_secure(address, self._transport, field="add")
        directory = await self._directory(request.name)
        listed = await asyncio.to_thread(change_replicas, directory, add=request.add, remove=request.remove)
        return pb.ChangeReplicasResponse(replicas=listed)

    async def _directory(self, name: str) -> Path:
        return Path((await self._runs.get(name)).run_dir)

    async def ReadLog(self, request: pb.ReadLogRequest, context: Context) -> AsyncIterator[pb.ReadLogResponse]:
        run, in_progress = await self._runs.get(request.name), self._runs.running.get(request.name)
        until = in_progress.ended if in_progress is not None and request.follow else None
        logs = Path(run.run_dir) / "logs"
        async with aclosing(read_log(logs, request.service or "coordinator", request.offset, until)) as answers:
            async for answer in answers:
                yield answer


def _addresses(message: pb.ServiceAddresses, transport: Transport) -> Addresses:
    """Converts addresses. Raises InvalidInput if one is not HOST:PORT or would use plaintext over a network."""
    rollout, reward = tuple(message.rollout), tuple(message.reward)
    trainers = message.trainer, message.reference, message.critic, message.teacher
    addresses = Addresses(rollout, reward, *trainers, transport)
    for name, address in addresses.named:
        require_secure(address, transport, field=f"addresses.{name}")
    return addresses
