"""Keeps a run and its services open inside a block, says what the services are doing until they are ready, and repeats
the session of a run whose trainer died.
"""

import asyncio
import contextvars
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Coroutine, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from typing import Generic, Never, Self

from lockstep.progress.v1 import progress_pb2 as pb
from lockstep.progress.v1.progress_pb2_grpc import ProgressServiceServicer, ProgressServiceStub
from rich.console import Console

from services.common.config.load import AnyConfig
from services.common.config.run import Config
from services.common.errors import DeadlineExceeded, LockstepError, Reason, Unavailable
from services.common.forks import Forks
from services.common.rpc.client import Client
from services.common.rpc.fence import new_token
from services.common.rpc.history import keeping
from services.common.rpc.tls import Transport
from services.common.tasks import task_group
from services.common.telemetry import within
from services.coordinator.fleet.launch import SERVICES, Addresses, Fleet, launch
from services.coordinator.fleet.membership import discovered
from services.coordinator.observe.frontend import log_to
from services.coordinator.observe.reporters import OpeningTimes, watchers
from services.coordinator.observe.terminal import StageLines
from services.coordinator.runs.reporter import Ending, Reporters
from services.coordinator.runs.resume import HISTORY, Start, await_ledger, open_run
from services.coordinator.runs.run import ConfigT, Restarts, Run

_START = "start"
# A call is made again when it has lasted so long, or when its service was restarted.
_WATCH_S = 3600.0


@asynccontextmanager
async def following_stages(addresses: Addresses, reporters: Reporters) -> AsyncIterator[None]:
    """Tells the reporters of all stages of the services in the block."""
    tasks = [
        # Its own context: this is not one of the run's calls, which its history records.
        asyncio.create_task(_follow(name, address, transport, reporters), context=contextvars.Context())
        for name, address, transport in _named(addresses)
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _named(addresses: Addresses) -> Iterator[tuple[str, str, Transport]]:
    """Yields name, address and transport of each service. The names are those of the logs: replicas have numbers."""
    numbers = Counter[str]()
    for name, address in addresses.named:
        transport = addresses.rollout_transport if name == "rollout" else addresses.transport
        has_number = name == "rollout" or (name == "reward" and len(addresses.reward) > 1)
        yield (f"{name}-{numbers[name]}" if has_number else name), address, transport
        numbers[name] += 1


async def _follow(name: str, address: str, transport: Transport, reporters: Reporters) -> None:
    client = Client(address, ProgressServiceStub, transport)
    try:
        while True:
            try:
                await _watch(name, client, reporters)
            except (Unavailable, DeadlineExceeded) as error:
                log.info("%s does not say what it does: %s", name, error.message)
    except LockstepError as error:  # the run does not need it
        log.info("%s cannot say what it does: %s", name, error.message)
    finally:
        await client.close()


async def _watch(name: str, client: Client, reporters: Reporters) -> None:
    """Follows one process of the service until it ends, beginning before it answers."""
    running = {_START: time.monotonic()}

    def tell(stage: str, seconds: float | None = None) -> None:
        began_s = running[stage]
        reporters.tell(lambda reporter: reporter.stage(name, stage, began_s, seconds))

    def end(stage: str, seconds: float) -> None:
        tell(stage, seconds)
        del running[stage]

    tell(_START)
    watching = client.stream(ProgressServiceServicer.Watch, pb.WatchRequest(), timeout_s=_WATCH_S, wait_for_ready=True)
    try:
        async with aclosing(watching):
            async for answer in watching:
                if not answer.stage:
                    end(_START, time.monotonic() - running[_START])
                elif answer.has_ended:
                    end(answer.stage, answer.seconds)
                else:
                    running[answer.stage] = time.monotonic() - answer.seconds
                    tell(answer.stage)
    finally:
        for stage in list(running):
            end(stage, 0.0)


log = logging.getLogger(__name__)

# Time for a trainer that lost its first rank to end the others before it exits.
_EXIT_ERROR_TIMEOUT_S = 20.0


@asynccontextmanager
async def recorded_run(
    config: ConfigT, console: Console | None, start: Start | None = None
) -> AsyncIterator[Run[ConfigT]]:
    """Opens the run's record, its log and its watchers, and keeps a history of its calls (rpc/history).

    Calls in the block share a new fencing token (rpc/fence.py). Watchers are opened and closed in a thread, because a
    tracker may take minutes, and a daemon has other runs. `console` shows warnings; it is None if the caller has
    configured logging. The run begins at `start`, which may be that of another config, or else as `open_run` says.

    Raises:
        LockstepError: See `open_run` and `watchers`.
    """
    if start is None:
        await await_ledger(config)
        start = open_run(config)
    try:
        run = Run(config, start)
    except BaseException:
        start.ledger.close()
        raise
    history = keeping(config.run_dir / HISTORY, run.run_id, start.ledger.num_rows())
    try:
        with within(run=run.run_id), new_token(config.timeouts.lease_s), history:
            if console is not None:
                log_to(config, console)
                run.reporters.add([StageLines(console)])
            run.reporters.add([OpeningTimes(run.clock)])
            await _until_done(asyncio.to_thread(lambda: run.reporters.add(watchers(run))))
            try:
                yield run
            except Exception as error:
                run.record_failure(error)
                raise
            except BaseException:
                run.ending = Ending.INTERRUPTED
                raise
    finally:
        await run.aclose()


async def _until_done(opening: Coroutine[object, Never, None]) -> None:
    """Waits for `opening`, also if this task is canceled meanwhile: what is opened must be closed."""
    task = asyncio.create_task(opening)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


@asynccontextmanager
async def running_services(
    run: Run[AnyConfig], addresses: Addresses, *, services: Collection[str] = SERVICES, sharing: Config | None = None
) -> AsyncIterator[Addresses]:
    """Yields the addresses of `services`. Those without an address are started first and stopped after the block.

    The block is canceled as soon as a started service dies for good. See `launch` for `sharing`.

    Raises:
        Unavailable: SERVICE_DIED, with the last lines of the service's log.
        LockstepError: Raised by the block.
    """
    if "rollout" in services:
        addresses = await discovered(run.config, addresses)
    launched = launch(run.config, addresses, services=services, sharing=sharing)
    async with launched as fleet, _watched_addresses(fleet, run) as addresses:
        yield addresses


@asynccontextmanager
async def _watched_addresses(fleet: Fleet, run: Run[AnyConfig]) -> AsyncIterator[Addresses]:
    async with unless_one_dies(fleet), following_stages(fleet.addresses, run.reporters):
        yield fleet.addresses


class Sessions(AsyncExitStack, Generic[ConfigT]):
    """Repeats the session of a run whose trainer died, as far as `config.restart` allows.

    It also does so if the last replica died in a run that cannot wait for it: a colocated one, or one with a lag.

    A repeated session resumes from the record, as the same command would in a new process. It has new trainers,
    unless only replicas were lost, and goes on with the other services that were started here. They stop at the end of
    the block of this context manager.
    """

    def __init__(self, config: ConfigT, addresses: Addresses):
        """Begins with `config`; `addresses` has the addresses of services that are not started here."""
        super().__init__()
        self.config: ConfigT = config
        self.restarts = Restarts(config.restart)
        self._addresses = addresses
        self._fleet: Fleet | None = None
        self._keeps_trainers = False

    async def __aenter__(self) -> Self:
        forks = self.restarts.forks = self.enter_context(Forks())
        if not self._addresses.trainer:
            forks.preload("services.trainer")  # while the coordinator reads its data
        return self

    @asynccontextmanager
    async def running_services(
        self, run: Run[ConfigT], services: Collection[str] = SERVICES
    ) -> AsyncIterator[Addresses]:
        """Yields the addresses of `services` to a session. The first starts those without an address.

        Raises:
            Unavailable: SERVICE_DIED, with the last lines of the service's log.
            LockstepError: Raised by the block.
        """
        self.restarts.run = run
        found = await discovered(run.config, self._addresses) if "rollout" in services else self._addresses
        if self._fleet is None:
            launched = launch(run.config, found, services=services, restarts=self.restarts)
            self._fleet = await self.enter_async_context(launched)
        else:
            limit_s = run.config.timeouts.open_s
            await self._fleet.start_again(found.rollout, keeps_trainers=self._keeps_trainers, timeout_s=limit_s)
        async with _watched_addresses(self._fleet, run) as addresses:
            yield addresses

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Ends the block, a session, without an error if it is to be repeated.

        A run that was asked to stop, or whose service died before it had loaded the model, is not repeated.

        Raises:
            LockstepError: The failure of a session that is not repeated.
        """
        try:
            yield
        except LockstepError as error:
            service = _to_restart(error, self._addresses)
            if not service or not self.restarts.may_resume or not self.restarts.take(service):
                raise
            log.warning("%s: %s\nstarting again and resuming from the record", error.reason, error.message)
            # A critic may be a step apart from the policy, which only a checkpoint mends.
            self._keeps_trainers = error.reason is Reason.NO_REPLICA and self.config.critic is None
            if self.config.resume == "never":  # the run has begun now
                self.config = self.config.model_copy(update={"resume": "auto"})


def _to_restart(error: LockstepError, addresses: Addresses) -> str:
    """Returns the name of the service whose death `error` is, if a new session starts it again; else ""."""
    service = error.metadata.get("service", "")
    if error.reason is Reason.SERVICE_DIED and service in addresses.trainers:
        return service
    if error.reason is Reason.NO_REPLICA:
        return service
    is_lost_rank = error.reason is Reason.RANK_FAILED and not any(addresses.trainers.values())
    return "trainer" if is_lost_rank else ""


@asynccontextmanager
async def unless_one_dies(fleet: Fleet) -> AsyncIterator[None]:
    """Cancels the block as soon as a service of `fleet` dies, so that its callers do not wait for their timeouts.

    Raises:
        Unavailable: SERVICE_DIED, with the last lines of the service's log.
    """
    async with task_group() as group:
        watching = group.create_task(fleet.watch())
        try:
            yield
        except Unavailable as error:
            # A call failed before the exit was noticed. The error of the exit is better: it includes the log.
            if error.reason is Reason.UNREACHABLE and fleet.children:
                await asyncio.wait({watching}, timeout=_EXIT_ERROR_TIMEOUT_S)
            raise
        finally:
            watching.cancel()
