"""Tells the coordinator what a service is doing, such as loading weights, and for how long."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Generator
from contextlib import contextmanager

import grpc
from lockstep.progress.v1 import progress_pb2 as pb
from lockstep.progress.v1 import progress_pb2_grpc

from services.common.telemetry import NO_TRACE, Span

log = logging.getLogger(__name__)


class Progress(progress_pb2_grpc.ProgressServiceServicer):
    """The stages of this process that are in progress. They may begin and end in any thread."""

    def __init__(self) -> None:
        self.trace = NO_TRACE
        """Gets a span for each stage."""
        self._lock = threading.Lock()
        self._running: list[Span] = []
        self._watchers: dict[asyncio.Queue[pb.WatchResponse | None], asyncio.AbstractEventLoop] = {}

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Shows the block as the stage `name`, a verb and its object, to all watchers; logs its time."""
        with self.trace.span(name) as span:
            self.begin(span)
            try:
                yield
            finally:
                self.end(span)

    def begin(self, span: Span) -> None:
        with self._lock:
            self._running.append(span)
            self._send(pb.WatchResponse(stage=span.name))

    def end(self, span: Span) -> None:
        log.info("%s: %.1f s", span.name, span.seconds)
        with self._lock:
            self._running.remove(span)
            self._send(pb.WatchResponse(stage=span.name, seconds=span.seconds, has_ended=True))

    def close(self) -> None:
        """Ends all calls of `Watch`."""
        with self._lock:
            self._send(None)

    async def Watch(
        self, request: pb.WatchRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[pb.WatchResponse]:
        yield pb.WatchResponse()  # the service answers
        queue = asyncio.Queue[pb.WatchResponse | None]()
        with self._lock:
            self._watchers[queue] = asyncio.get_running_loop()
            for span in self._running:
                queue.put_nowait(pb.WatchResponse(stage=span.name, seconds=time.perf_counter() - span.began_s))
        try:
            while (answer := await queue.get()) is not None:
                yield answer
        finally:
            with self._lock:
                del self._watchers[queue]

    def _send(self, answer: pb.WatchResponse | None) -> None:
        for queue, loop in self._watchers.items():
            # Stages begin and end in any thread, and asyncio's queues are for the thread of their loop.
            loop.call_soon_threadsafe(queue.put_nowait, answer)


PROGRESS = Progress()
"""That of this process."""
