"""Context managers that keep a run and its services open."""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, closing, contextmanager

from rich.console import Console

from services.common.config.any import AnyConfig
from services.common.config.run import Config
from services.common.errors import Unavailable
from services.common.rpc.fence import new_token
from services.common.rpc.history.calls import keeping
from services.common.tasks import task_group
from services.common.telemetry.context import within
from services.coordinator.observe.log_files import log_to
from services.coordinator.observe.watchers import watchers
from services.coordinator.runs.resume import HISTORY, Start, open_run
from services.coordinator.runs.run import ConfigT, Run
from services.coordinator.services.launch import SERVICES, Addresses, Fleet, launch

_EXIT_ERROR_TIMEOUT_S = 5.0


@contextmanager
def recorded_run(config: ConfigT, console: Console | None, start: Start | None = None) -> Iterator[Run[ConfigT]]:
    """Opens the run's record, its log and its watchers, and keeps a history of its calls (rpc/history).

    Calls in the block share a new fencing token (rpc/fence.py).

    Args:
        config: The run's config; `start` may be that of another.
        console: Shows warnings; None if the caller has configured logging.
        start: Where the run starts; by default what `open_run` returns.

    Raises:
        LockstepError: See `open_run` and `watchers`.
    """
    start = start or open_run(config)
    try:
        opened = Run(config, start)
    except BaseException:
        start.ledger.close()
        raise
    history = keeping(config.run_dir / HISTORY, opened.run_id, start.ledger.num_rows())
    with closing(opened) as run, within(run=run.run_id), new_token(), history:
        if console is not None:
            log_to(config, console)
        run.watchers = watchers(run)
        try:
            yield run
        except Exception as error:
            run.record_failure(error)
            raise


@asynccontextmanager
async def running_services(
    run: Run[AnyConfig], given: Addresses, *, services: Collection[str] = SERVICES, sharing: Config | None = None
) -> AsyncIterator[Addresses]:
    """Yields the addresses of `services`. Those without an address are started first and stopped after the block.

    The block is cancelled as soon as a started service dies. See `launch` for `sharing`.

    Raises:
        Unavailable: SERVICE_DIED, with the last lines of the service's log.
        LockstepError: Raised by the block.
    """
    async with launch(run.config, given, services=services, sharing=sharing) as fleet, unless_one_dies(fleet):
        yield fleet.addresses


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
        except Unavailable:
            # A call failed before the exit was noticed. The error of the exit is better: it includes the log.
            await asyncio.wait({watching}, timeout=_EXIT_ERROR_TIMEOUT_S)
            raise
        finally:
            watching.cancel()
