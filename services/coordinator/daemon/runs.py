"""Manages all runs of a daemon: those in progress, those that ended in this process, and those found in its
directory."""

import asyncio
import logging
import signal
from pathlib import Path

from lockstep.coordinator.v1 import coordinator_pb2 as pb

from services.common.config.run import Config
from services.common.counted import counted
from services.common.errors import InvalidInput, NotFound, PreconditionFailed, Unavailable
from services.coordinator.daemon.history import read_run, state_name
from services.coordinator.daemon.hosted import HostedRun
from services.coordinator.services.gpus import visible_gpus
from services.coordinator.services.launch import Addresses, started_ranks, starts_replicas

log = logging.getLogger(__name__)

_UNSET = Config.model_fields["runs_dir"].default


class Runs:
    """Runs by name, each in its subdirectory of `directory`."""

    def __init__(self, directory: Path):
        self.directory = directory.absolute()
        self.running: dict[str, HostedRun] = {}
        self.is_ending = False
        self._ended: dict[str, pb.Run] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, config: Config, given: Addresses) -> pb.Run:
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
        self._require_gpus(config, given)
        hosted = HostedRun(config.model_copy(update={"runs_dir": self.directory}), given)
        self.running[config.name] = hosted
        task = asyncio.create_task(self._host(hosted))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return hosted.state

    async def get(self, name: str) -> pb.Run:
        """Returns the state of the run `name`.

        Raises:
            NotFound: There is no such run.
        """
        if name in self.running:
            return self.running[name].state
        found = self._ended.get(name) or next(iter(await asyncio.to_thread(_read_runs, self.directory, name)), None)
        if found is None:
            raise NotFound(
                f"there is no run {name} in {self.directory}; `lockstep status` lists all runs", field="name"
            )
        return found

    async def all(self) -> list[pb.Run]:
        """Returns the state of all runs, sorted by name."""
        found = {run.name: run for run in await asyncio.to_thread(_read_runs, self.directory)}
        found |= self._ended | {name: hosted.state for name, hosted in self.running.items()}
        return [found[name] for name in sorted(found)]

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
        for hosted in self.running.values():
            hosted.stop(now=now)

    async def _host(self, hosted: HostedRun) -> None:
        name = hosted.config.name
        log.info("run %s started", name)
        await hosted.end()
        del self.running[name]
        self._ended[name] = hosted.state
        error = f": {hosted.state.error}" if hosted.state.error else ""
        log.info("run %s %s%s", name, state_name(hosted.state), error)

    def _require_gpus(self, config: Config, given: Addresses) -> None:
        holder = next((name for name, hosted in self.running.items() if _starts(hosted.config, hosted.given)), None)
        if holder and visible_gpus() and _starts(config, given):
            raise PreconditionFailed(
                f"run {holder} has started services on the GPUs of this host: give the addresses of running services, "
                "or start this run after that one ends"
            )


def _starts(config: Config, given: Addresses) -> bool:
    """Returns whether the run starts a service that needs a GPU on this host."""
    return starts_replicas(config, given) or bool(started_ranks(config, given))


def _read_runs(directory: Path, name: str | None = None) -> list[pb.Run]:
    """Reads all runs in `directory`, or only `name`, which is compared with existing names and never part of a path."""
    entries = directory.iterdir() if directory.is_dir() else ()
    runs = (read_run(entry) for entry in entries if name is None or entry.name == name)
    return [run for run in runs if run is not None]
