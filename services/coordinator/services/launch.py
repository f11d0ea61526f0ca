"""Starts the services that were given no address, on this host, and ends all that it started."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.common.config.run import Config
from services.common.errors import InvalidInput, Reason, Unavailable
from services.common.rpc.ports import hold_free_port
from services.common.rpc.tls import LOCAL, Transport
from services.common.tasks import gather
from services.coordinator.observe.trace import trace_path
from services.coordinator.runs.resume import CHECKPOINTS
from services.coordinator.services.devices import split_gpus, visible_gpus
from services.coordinator.services.flags import ServiceFlags

log = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_GRACE_S = 10.0
_MAX_RESTARTS = 3
_LOG_LINES = 15
SERVICES = ("trainer", "reward", "rollout")


@dataclass(frozen=True)
class Addresses:
    """Where the services are, and how they are reached; what is empty is started here."""

    rollout: tuple[str, ...] = ()
    reward: str = ""
    trainer: str = ""
    reference: str = ""
    critic: str = ""
    transport: Transport = LOCAL
    started: frozenset[str] = frozenset()
    """Those of services that were started here, and end with the run."""

    def of(self, model: str) -> str:
        """Where the model of a config section is: on a trainer of its own, or on the policy's."""
        return getattr(self, model) or self.trainer

    def require_own(self, config: Config) -> None:
        """Raises InvalidInput if a model has an address here but none of its own in `config`."""
        for name in ("reference", "critic"):
            if getattr(self, name) and (name not in config.models or getattr(config, name).deployment != "own"):
                raise InvalidInput(f"--{name}: set {name}.deployment=own, or leave it out", field=f"--{name}")


@dataclass
class Child:
    """One started service, leader of a session of its own."""

    name: str
    command: Sequence[str]
    log_path: Path
    restarts_left: int = 0
    gpus: str | None = None
    checkpoints: Path | None = None
    """Where the run's are, if the same command would go on from the newest of them."""
    process: asyncio.subprocess.Process | None = field(default=None)

    async def start(self) -> None:
        """Starts it, its output appended to its log."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        env = os.environ | ({} if self.gpus is None else {"CUDA_VISIBLE_DEVICES": self.gpus})
        with self.log_path.open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=env,
            )
        log.info("started %s as process %d", self.name, self.process.pid)

    async def watch(self) -> None:
        """Waits for its end; starts it again while it may be.

        Raises:
            Unavailable: SERVICE_DIED, with the end of its log.
        """
        while True:
            assert self.process is not None
            code = await self.process.wait()
            if self.restarts_left == 0:
                resumes = self.checkpoints is not None and any(self.checkpoints.glob("*/manifest.json"))
                then = "; the same command goes on from the newest checkpoint" if resumes else ""
                tail = "\n".join(self.log_path.read_text(errors="replace").splitlines()[-_LOG_LINES:])
                raise Unavailable(
                    f"{self.name} ended with exit code {code}{then}; the end of {self.log_path}:\n{tail}",
                    reason=Reason.SERVICE_DIED,
                )
            self.restarts_left -= 1
            log.warning("%s ended with exit code %d; starting it again", self.name, code)
            self._signal(signal.SIGKILL)  # what it left in its session
            await self.start()

    async def end(self) -> None:
        """Asks it to end, then ends it and all of its session."""
        if self.process is None:
            return
        if self.process.returncode is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), _GRACE_S)
        self._signal(signal.SIGKILL)
        await self.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # nobody is left in the session
            os.killpg(self.process.pid, number)


class Fleet:
    """The started services."""

    def __init__(self, addresses: Addresses, children: Sequence[Child]):
        self.addresses, self._children = addresses, children

    async def watch(self) -> None:
        """Never returns; raises when a service that the run cannot do without has ended."""
        await gather([*(child.watch() for child in self._children), asyncio.Event().wait()])


@contextlib.asynccontextmanager
async def launch(
    config: Config, given: Addresses, *, services: Collection[str] = SERVICES, sharing: Config | None = None
) -> AsyncIterator[Fleet]:
    """Services for `config`: those of `given`, the rest started here and ended on the way out, however that is.

    Of the kinds that are not among `services`, as a supervised run has no rollout and no reward, none is started.
    Trainers divide this host's cores as those of `sharing` do, if it is given: a sum depends on the number of threads.
    """
    starts_rollout = "rollout" in services and not given.rollout
    ranks = started_ranks(config, given) if "trainer" in services else {}
    gpus = split_gpus(ranks, config, available=visible_gpus(), start_rollout=starts_rollout)
    children: list[Child] = []
    started: set[str] = set()
    with contextlib.ExitStack() as ports:
        flags = ServiceFlags(config, _HOST, ports)

        def add(name: str, *module: str, restarts: int = 0) -> str:
            address = f"{_HOST}:{hold_free_port(_HOST, ports)}"
            command = [sys.executable, *module, "--listen", address, "--exit-with", str(os.getpid())]
            command += ["--tls", str(given.transport.tls.directory)] if given.transport.tls else []
            command += ["--trace", str(trace_path(config.run_dir, name))] if config.trace else []
            command += flags.of(name)
            log_path = config.run_dir / "logs" / f"{name}.log"
            checkpoints = config.run_dir / CHECKPOINTS if config.resume in ("auto", "must") else None
            children.append(Child(name, command, log_path, restarts, gpus.get(name), checkpoints))
            started.add(address)
            return address

        trainers = {name: getattr(given, name) for name in ("trainer", "reference", "critic")}
        threads = str(_threads_per_rank(started_ranks(sharing or config, given)))
        for name, count in ranks.items():
            sizes = ("--nproc-per-node", str(count), "--threads-per-rank", threads)
            trainers[name] = add(name, "-m", "services.trainer", *sizes)
        addresses = Addresses(
            reward=given.reward or (add("reward", "-m", "services.reward") if "reward" in services else ""),
            **trainers,
            transport=given.transport,
            rollout=given.rollout
            or tuple(
                add(f"rollout-{index}", "-m", "services.rollout", restarts=_MAX_RESTARTS)
                for index in range(config.rollout.num_replicas if starts_rollout else 0)
            ),
            started=frozenset(started),  # by now all are
        )
        flags.write_targets()
    try:
        for child in children:
            await child.start()
        yield Fleet(addresses, children)
    finally:
        await asyncio.gather(*(child.end() for child in children))
        flags.remove_targets()


def started_ranks(config: Config, given: Addresses) -> dict[str, int]:
    """Models of `config` whose ranks are started here, and how many."""
    return {name: model.num_ranks for name, model in config.models.items() if _is_started(name, config, given)}


def _threads_per_rank(ranks: Mapping[str, int]) -> int:
    """Trainers that each took all cores would wait for one another's threads: ten times as long, on two cores."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, sum(ranks.values())))


def _is_started(name: str, config: Config, given: Addresses) -> bool:
    has_own = name == "trainer" or getattr(config, name).deployment == "own"
    return has_own and not getattr(given, name)
