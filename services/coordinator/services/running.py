"""Holds a run and its services open for the length of a block."""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, closing, contextmanager

from rich.console import Console

from services.common.config.run import Config
from services.common.errors import Unavailable
from services.common.telemetry.context import within
from services.coordinator.observe.log_files import log_to
from services.coordinator.observe.watchers import watchers
from services.coordinator.runs.resume import Start, open_run
from services.coordinator.runs.run import Run
from services.coordinator.services.launch import SERVICES, Addresses, Fleet, launch

_LAST_WORDS_S = 5.0


@contextmanager
def recorded_run(config: Config, console: Console | None, start: Start | None = None) -> Iterator[Run]:
    """Opens the run's record, its log and its watchers; without a `console` the caller has configured logging.

    Args:
        config: The run's, which `start` may differ from.
        console: Warnings are shown here.
        start: Where the run starts; by default as `open_run` decides.

    Raises:
        LockstepError: As `open_run` and `watchers`.
    """
    with closing(Run(config, start or open_run(config))) as run, within(run=run.run_id):
        if console is not None:
            log_to(config, console)
        run.watchers = watchers(run)
        yield run


@asynccontextmanager
async def running_services(
    run: Run, given: Addresses, *, services: Collection[str] = SERVICES, sharing: Config | None = None
) -> AsyncIterator[Addresses]:
    """Yields the addresses of `services`. Those without an address are started first, and ended with the block.

    The block is cancelled as soon as a started service dies. `sharing` is that of `launch`.

    Raises:
        Unavailable: SERVICE_DIED, with the end of the service's log.
        LockstepError: As the block raises it.
    """
    async with launch(run.config, given, services=services, sharing=sharing) as fleet, unless_one_dies(fleet):
        yield fleet.addresses


@asynccontextmanager
async def unless_one_dies(fleet: Fleet) -> AsyncIterator[None]:
    """Cancels the block as soon as a service of `fleet` dies, and raises why: its callers might wait much longer.

    Raises:
        Unavailable: SERVICE_DIED, with the end of the service's log.
    """
    try:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(fleet.watch())
            try:
                yield
            except Unavailable:
                # A call noticed first. The service's own end, with its log, says more.
                await asyncio.wait({watching}, timeout=_LAST_WORDS_S)
                raise
            finally:
                watching.cancel()
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None  # the service's death comes before its consequences
