"""Ranks that are threads of the test's process, and end with the test."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable

import zmq

from services.trainer.ranks.calls import Message, Ranks, follow
from tests.support import PATIENCE_S


@contextlib.asynccontextmanager
async def following(ranks: Ranks, *workers: object) -> AsyncIterator[None]:
    """Runs each of the workers as a rank, in a thread."""
    targets = [
        lambda rank=rank, worker=worker: follow(rank, ranks.address, worker) for rank, worker in enumerate(workers)
    ]
    async with threads_of(ranks, *targets):
        yield


@contextlib.asynccontextmanager
async def threads_of(ranks: Ranks, *targets: Callable[[], object]) -> AsyncIterator[None]:
    """Runs each target, which follows `ranks`, in a thread.

    Unlike `Ranks.end`, which ends the process's ZeroMQ, this lets other ranks go on. A thread that was left would log
    that rank 0 is gone when pytest has closed its streams.
    """
    threads = [threading.Thread(target=target, daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        if watching := getattr(ranks, "_watching", None):
            watching.cancel()
        for rank in range(ranks.num_ranks):
            with contextlib.suppress(zmq.ZMQError):  # one that never came, or was lost
                await ranks._socket.send_multipart([b"%d" % rank, b"end", *Message({}).pack()])
        for thread in threads:
            await asyncio.to_thread(thread.join, PATIENCE_S)
            assert not thread.is_alive()
