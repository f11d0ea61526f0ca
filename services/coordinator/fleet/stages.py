"""Follows what the services of a run are doing, so that nobody waits for minutes without a sign."""

import asyncio
import contextvars
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager

from lockstep.progress.v1 import progress_pb2 as pb
from lockstep.progress.v1.progress_pb2_grpc import ProgressServiceServicer, ProgressServiceStub

from services.common.errors import DeadlineExceeded, LockstepError, Unavailable
from services.common.rpc.client import Client
from services.common.rpc.tls import Transport
from services.coordinator.fleet.launch import Addresses
from services.coordinator.runs.reporter import Reporters

log = logging.getLogger(__name__)

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
    """Yields name, address and transport of each service; of several replicas, the names have their numbers."""
    numbers = Counter[str]()
    for name, address in addresses.named:
        transport = addresses.rollout_transport if name == "rollout" else addresses.transport
        several = len(addresses.reward) if name == "reward" else len(addresses.rollout) if name == "rollout" else 1
        yield (f"{name}-{numbers[name]}" if several > 1 else name), address, transport
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
