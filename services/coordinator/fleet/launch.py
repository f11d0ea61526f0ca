"""Starts, on this host, the services that have no address, and stops them with the run."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from services.common.config.load import AnyConfig, role_section
from services.common.config.run import Config
from services.common.errors import InvalidInput, Reason, Unavailable
from services.common.files import write_whole
from services.common.forks import FORKABLE, Forked, Forks, service_environment
from services.common.memory import killed_hint
from services.common.process import require_extra
from services.common.rpc.address import hold_free_port, parse_address
from services.common.rpc.tls import LOCAL, Transport
from services.common.tasks import gather
from services.coordinator.clients.gpus import split_gpus, visible_gpus
from services.coordinator.observe.reporters import trace_path
from services.coordinator.runs.resume import CHECKPOINTS
from services.coordinator.runs.run import Restarts

log = logging.getLogger(__name__)

TARGETS = "prometheus.json"
SERVICES = ("trainer", "reward", "rollout")
_HOST = "127.0.0.1"
_GRACE_S = 10.0
_LOG_LINES = 15
# An engine makes sockets in directories of TMPDIR, and the path of a socket has at most 107 characters.
_MOST_TMPDIR_CHARS = 50
# Config key to lower when a service is killed for memory.
_MEMORY_KEYS = {
    "reward": "reward.max_memory_gib, which each of its worker processes may use",
    "rollout": "rollout.max_samples or rollout.engine.kv_cache_memory_bytes",
}


class ServiceFlags:
    """Builds these flags for each started service, and lists the metrics pages for Prometheus."""

    def __init__(self, config: AnyConfig, host: str, ports: ExitStack):
        self._config, self._settings = config, config.observability
        self._host, self._ports = host, ports
        self._targets: list[dict[str, object]] = []

    def of(self, name: str) -> list[str]:
        """Returns the flags of the service `name`."""
        settings, flags = self._settings, []
        if settings.metrics_address:
            page = f"{self._host}:{hold_free_port(self._host, self._ports)}"
            self._add_target(page, name)
            flags += ["--metrics", page]
        flags += ["--otel", settings.otel_endpoint] if settings.otel_endpoint else []
        return [*flags, "--log-format", settings.log_format]

    def write_targets(self) -> None:
        """Writes the Prometheus target list (file_sd_configs): the services' metrics pages and the coordinator's."""
        if self._settings.metrics_address:
            self._add_target(self._settings.metrics_address, "coordinator")
            write_whole(self._config.run_dir / TARGETS, json.dumps(self._targets, indent=1) + "\n")

    def remove_targets(self) -> None:
        """Deletes the target list once the services have stopped. A disk that forbids it does not end the run."""
        path = self._config.run_dir / TARGETS
        try:
            if path.exists():  # a read-only disk refuses to delete also what is not there
                path.unlink()
        except OSError as error:
            log.warning("%s is of a run that has ended, and cannot be deleted: %s", path, error.strerror)

    def _add_target(self, page: str, name: str) -> None:
        labels = {"job": self._config.name, "lockstep_process": name}
        self._targets.append({"targets": [page], "labels": labels})


@dataclass(frozen=True)
class Addresses:
    """The services' addresses and how to connect to them. A service with an empty address is started here."""

    rollout: tuple[str, ...] = ()
    reward: tuple[str, ...] = ()
    trainer: str = ""
    reference: str = ""
    critic: str = ""
    teacher: str = ""
    transport: Transport = LOCAL
    rollout_name: str = ""
    """Name that the certificates of the replicas are valid for, if it is not that of their addresses."""
    started: frozenset[str] = frozenset()
    """Addresses of the services that were started here and stop with the run."""

    def __post_init__(self) -> None:
        """Raises InvalidInput if an address of a replica is given twice."""
        for address, number in Counter(self.rollout).items():
            if number > 1:
                raise InvalidInput(
                    f"--rollout {address} is given {number} times; give each replica once", field="--rollout"
                )

    def of(self, model: str) -> str:
        """Returns the address of the trainer of config section `model`: its own if it has one, else the policy's."""
        return self.trainers[model] or self.trainer

    @property
    def rollout_transport(self) -> Transport:
        return replace(self.transport, name=self.rollout_name)

    @property
    def trainers(self) -> dict[str, str]:
        """Returns the trainer address of each model, by config section; empty if none was given."""
        return {"trainer": self.trainer, "reference": self.reference, "critic": self.critic, "teacher": self.teacher}

    @property
    def named(self) -> list[tuple[str, str]]:
        several = [(name, one) for name, these in (("rollout", self.rollout), ("reward", self.reward)) for one in these]
        return [(name, address) for name, address in [*self.trainers.items(), *several] if address]

    def require_own(self, config: Config) -> None:
        """Raises InvalidInput if a model has an address here but `config` gives it no trainer of its own."""
        for name, address in self.trainers.items():
            is_own = name in config.models and _has_own_ranks(config, name)
            if address and not is_own:
                raise InvalidInput(f"--{name}: set {name}.deployment=own, or omit the option", field=f"--{name}")

    def require_placement(self, config: Config) -> None:
        """Raises InvalidInput if `config` is colocated but trainer and rollout are not on one host."""
        if config.placement != "colocated":
            return
        hosts = {parse_address(address, field="placement")[0] for address in (self.trainer, *self.rollout) if address}
        if bool(self.trainer) != bool(self.rollout) or len(hosts) > 1:
            there = ", ".join(f"--{name} {address}" for name, address in self.named if name in ("trainer", "rollout"))
            raise InvalidInput(
                f"placement colocated: trainer and rollout must be on one host and share its GPUs, but {there} is "
                "given; start both here or both on one other host, or set placement disaggregated",
                field="placement",
            )


@dataclass
class Child:
    """A started service, which is the leader of its own process session."""

    name: str
    command: Sequence[str]
    log_path: Path
    restarts: Restarts | None = None
    """How often it is started again in place; None if never."""
    gpus: str | None = None
    checkpoints: Path | None = None
    """Directory of the run's checkpoints, if the same command would resume from the newest of them."""
    process: asyncio.subprocess.Process | Forked | None = None
    starting: asyncio.Task[None] = field(init=False)
    _files: ExitStack = field(init=False, default_factory=ExitStack)
    """Removes the temporary files of a replica, which may be killed before it does so."""

    @property
    def is_forked(self) -> bool:
        return self.command[2] in FORKABLE

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def start(self, forks: Forks) -> None:
        """Starts the process and appends its output to its log. A fork waits until its packages are imported."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._files.close()
        env = {} if self.gpus is None else {"CUDA_VISIBLE_DEVICES": self.gpus}
        if self.name.startswith("rollout"):  # others keep caches there, such as compiled code
            made = tempfile.TemporaryDirectory(prefix="lockstep-", ignore_cleanup_errors=True)
            directory = self._files.enter_context(made)
            env |= {"TMPDIR": directory} if len(directory) <= _MOST_TMPDIR_CHARS else {}
        _, _, module, *args = self.command
        if self.is_forked:
            self.process = await forks.start(module, args, self.log_path, env)
        else:
            with self.log_path.open("ab") as output:
                self.process = await asyncio.create_subprocess_exec(
                    *self.command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C reaches this process alone, which ends its services in order
                    env=service_environment() | env,
                )
        log.info("started %s as process %d", self.name, self.process.pid)

    async def watch(self, forks: Forks) -> None:
        """Waits until the process exits, and starts it again while `restarts` allows.

        Raises:
            Unavailable: SERVICE_DIED, with the last lines of its log; the metadata has its name as `service`.
        """
        await self.starting
        while True:
            assert self.process is not None
            code = await self.process.wait()
            if self.restarts is None or not self.restarts.take(self.name):
                resumes = self.checkpoints is not None and any(self.checkpoints.glob("*/manifest.json"))
                then = "; run the same command again to resume from the newest checkpoint" if resumes else ""
                tail = "\n".join(self.log_path.read_text(errors="replace").splitlines()[-_LOG_LINES:])
                raise Unavailable(
                    f"{self.name} exited with code {code}{self._hint(code)}{then}; "
                    f"the last lines of {self.log_path}:\n{tail}",
                    reason=Reason.SERVICE_DIED,
                    service=self.name,
                )
            log.warning("%s exited with code %d%s; restarting it", self.name, code, self._hint(code))
            self._signal(signal.SIGKILL)  # processes that it left in its session
            await self.start(forks)

    async def end(self) -> None:
        """Sends SIGTERM and, after it exits or a grace period passes, SIGKILL to its whole session."""
        self.starting.cancel()
        with self._files:
            if self.process is None:
                return
            if self.process.returncode is None:
                self._signal(signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.process.wait(), _GRACE_S)
            self._signal(signal.SIGKILL)
            if isinstance(self.process, Forked) and self.is_running:
                self.process.kill()  # its parent, which would tell its end, may be stopped
            await self.process.wait()

    def _hint(self, code: int) -> str:
        if code != -signal.SIGKILL:
            return ""
        if isinstance(self.process, Forked) and self.process.why:
            return f": {self.process.why}\n"
        service = self.name.partition("-")[0]
        return f": {killed_hint(_MEMORY_KEYS.get(service, f'{service}.max_tokens_per_microbatch'))}"

    def _signal(self, number: signal.Signals) -> None:
        assert self.process is not None, "it was started"
        with contextlib.suppress(ProcessLookupError):  # no process is left in the session
            os.killpg(self.process.pid, number)


class Fleet:
    def __init__(self, addresses: Addresses, children: Sequence[Child], forks: Forks):
        self.addresses, self.children, self._forks = addresses, children, forks

    async def start(self) -> None:
        """Starts all services. It does not wait for the imports of those that are forked."""
        await self._start(self.children)

    async def start_again(self, rollout: tuple[str, ...], *, keeps_trainers: bool, timeout_s: float) -> None:
        """Starts what has ended, and new trainers unless it `keeps_trainers`, and waits until their processes run.

        The replicas that are not started here are those at `rollout`.

        Raises:
            Unavailable: SERVICE_DIED if the imports fail, UNREACHABLE if they last longer than `timeout_s`.
        """
        if rollout:
            self.addresses = replace(self.addresses, rollout=rollout)
        again = [one for one in self.children if not one.is_running or (one.restarts is None and not keeps_trainers)]
        await gather(child.end() for child in again)
        await self._start(again)
        # A call that reaches a rank that is still ending is made again for 30 s, and the imports may take longer.
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(child.starting for child in again))
        except TimeoutError as error:
            names = ", ".join(child.name for child in again if not child.is_running)
            message = f"{names}: the packages were not imported within {timeout_s:g} s (timeouts.open_s)"
            raise Unavailable(message) from error

    async def _start(self, children: Sequence[Child]) -> None:
        for child in children:
            child.starting = asyncio.create_task(child.start(self._forks), name=f"start {child.name}")
        await asyncio.gather(*(child.starting for child in children if not child.is_forked))

    async def watch(self) -> None:
        """Raises when a service has exited and has no restarts left; never returns."""
        await gather([*(child.watch(self._forks) for child in self.children), asyncio.Event().wait()])


@contextlib.asynccontextmanager
async def launch(
    config: AnyConfig,
    addresses: Addresses,
    *,
    services: Collection[str] = SERVICES,
    sharing: Config | None = None,
    on_cpu: bool = False,
    restarts: Restarts | None = None,
) -> AsyncIterator[Fleet]:
    """Yields the services for `config`: those of `addresses`, and the others, which are started and always stopped.

    Only kinds in `services` are started, and with `on_cpu` they use no GPU. If `sharing` is given, each rank gets as
    many CPU threads as in a run of that config, because sums depend on the number of threads. All but trainers are
    started again as `restarts` allows, or else `config.restart`.
    """
    num_replicas = 0
    if "rollout" in services and isinstance(config, Config):
        addresses.require_placement(config)
        num_replicas = 0 if addresses.rollout else config.rollout.num_replicas
    ranks = started_ranks(config, addresses) if "trainer" in services else {}
    split = partial(split_gpus, ranks, config, start_rollout=num_replicas > 0)
    gpus = dict.fromkeys(ranks, "") if on_cpu else split(available=visible_gpus())
    children, started, restarts = list[Child](), set[str](), restarts or Restarts(config.restart)
    transport = addresses.transport
    with contextlib.ExitStack() as ports:  # each stays reserved until all are chosen
        flags = ServiceFlags(config, _HOST, ports)

        def add(name: str, service: str, *sizes: str) -> str:
            require_extra(service)
            address = f"{_HOST}:{hold_free_port(_HOST, ports)}"
            command = [sys.executable, "-m", f"services.{service}", *sizes]
            # If this process is killed, nobody is left to end the service: it watches for that itself.
            command += ["--listen", address, "--exit-with", str(os.getpid())]
            command += ["--tls", str(transport.tls.directory)] if transport.tls else []
            command += ["--trace", str(trace_path(config.run_dir, name))] if config.trace else []
            command += flags.of(name)
            log_path = config.run_dir / "logs" / f"{name}.log"
            checkpoints = config.run_dir / CHECKPOINTS if config.resume != "never" else None
            again = None if name in ranks else restarts  # a new trainer has no weights: the session begins again
            children.append(Child(name, command, log_path, again, gpus.get(name), checkpoints))
            started.add(address)
            return address

        # If each rank used all cores, a step took ten times as long on two cores.
        num_ranks = sum(started_ranks(sharing or config, addresses).values())
        threads = ("--threads-per-rank", str(max(1, len(os.sched_getaffinity(0)) // max(1, num_ranks))))
        trainers = {name: add(name, "trainer", "--nproc-per-node", str(n), *threads) for name, n in ranks.items()}
        reward = addresses.reward or ((add("reward", "reward"),) if "reward" in services else ())
        replicas = tuple(add(f"rollout-{index}", "rollout") for index in range(num_replicas))
        rollout = addresses.rollout or replicas
        addresses = replace(addresses, **trainers, reward=reward, rollout=rollout, started=frozenset(started))
        flags.write_targets()
    with contextlib.nullcontext(restarts.forks) if restarts.forks else Forks() as forks:
        fleet = Fleet(addresses, children, forks)
        try:
            await fleet.start()
            yield fleet
        finally:
            await asyncio.gather(*(child.end() for child in children))
            flags.remove_targets()


def starts_replicas(config: AnyConfig, addresses: Addresses) -> bool:
    """Returns whether the run starts its replicas on this host: it has no addresses of others, and looks for none."""
    return isinstance(config, Config) and not addresses.rollout and not config.rollout.discovery


def started_ranks(config: AnyConfig, addresses: Addresses) -> dict[str, int]:
    """Returns the number of ranks of each model in `config` whose trainer is started here."""
    there = addresses.trainers
    return {
        name: model.num_ranks
        for name, model in config.models.items()
        if _has_own_ranks(config, name) and not there[name]
    }


def _has_own_ranks(config: AnyConfig, name: str) -> bool:
    section = role_section(config, name)
    return section is None or section.deployment == "own"
