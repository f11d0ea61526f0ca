"""Serves metrics to Prometheus. Each process has its own registry; the name of a metric ends with its unit."""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Info,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from services.common.errors import InvalidInput
from services.common.rpc.address import parse_address, require_loopback
from services.common.rpc.server import INCARNATION

log = logging.getLogger(__name__)

# A connection is closed after this time, whether it has sent a request or not.
_CONNECTION_S = 10.0
# One more connection closes the oldest, so that idle ones keep nobody out.
_MAX_CONNECTIONS = 64


class PageServer:
    """Answers every GET request from a thread with what `page` returns, as `content_type`."""

    def __init__(self, host: str, port: int, page: Callable[[], bytes], content_type: str):
        """Listens; port 0 picks a free port.

        Raises:
            OSError: The port is in use, or `host` is not an address of this machine.
        """
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(where[:2], family=family)
        self.port: int = listener.getsockname()[1]
        self._page, self._content_type = page, content_type
        self._open: dict[asyncio.StreamWriter, None] = {}  # the oldest first
        self._runner, self._closing = asyncio.Runner(loop_factory=asyncio.new_event_loop), asyncio.Event()
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._run, args=(listener,), name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening and closes all connections."""
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def _run(self, listener: socket.socket) -> None:
        with self._runner:  # its end cancels what is still being answered
            self._runner.run(self._serve(listener))

    async def _serve(self, listener: socket.socket) -> None:
        async with await asyncio.start_server(self._answer, sock=listener):
            await self._closing.wait()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= _MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        self._open[writer] = None
        try:
            async with asyncio.timeout(_CONNECTION_S):
                head = await reader.readuntil(b"\r\n\r\n")
                is_get = head.startswith(b"GET ")
                status, body = ("200 OK", self._page()) if is_get else ("405 Method Not Allowed", b"")
                fields = f"Content-Type: {self._content_type}\r\nContent-Length: {len(body)}\r\nConnection: close"
                writer.write(f"HTTP/1.1 {status}\r\n{fields}\r\n\r\n".encode() + body)
                writer.close()
                await writer.wait_closed()  # until all is sent
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client is gone, sends nothing or too much, or does not read
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()


@dataclass(frozen=True)
class Page:
    """Says where metrics are served; an empty `address` serves none."""

    address: str = ""
    insecure: bool = False
    field: str = "--metrics"
    consent: str = "pass --metrics-insecure"
    """What an error message tells the user to do to allow another interface than loopback."""


class Metrics:
    """Holds the metrics registry of a process and serves it.

    Raises:
        InvalidInput: The page's address is malformed or not loopback.
    """

    def __init__(self, service: str, page: Page = Page()):
        self._page = page
        self._server: PageServer | None = None
        if page.address:
            self._host, self._port = parse_address(page.address, field=page.field)
            require_loopback(self._host, insecure=page.insecure, field=page.field, consent=page.consent)
        disable_created_metrics()  # would add a second series to each counter: its creation time
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        about = Info("lockstep_service", "Name, version and incarnation of the service.", registry=self.registry)
        about.info({"service": service, "version": version("lockstep-rl"), "incarnation": INCARNATION})

    @property
    def is_served(self) -> bool:
        """Returns whether metrics are served, or will be."""
        return bool(self._page.address)

    def serve(self) -> int:
        """Serves http://HOST:PORT/metrics from a thread, if there is an address.

        Returns:
            The port, which is a free one if the address has port 0; 0 if nothing is served.

        Raises:
            InvalidInput: The port is in use, or the address is not one of this host.
        """
        if not self._page.address:
            return 0
        try:
            page = partial(generate_latest, self.registry)
            self._server = PageServer(self._host, self._port, page, CONTENT_TYPE_LATEST)
        except OSError as error:
            raise InvalidInput(f"{self._page.field} {self._page.address}: {error}", field=self._page.field) from error
        log.info("metrics on http://%s:%d/metrics", self._host, self._server.port)
        return self._server.port

    def close(self) -> None:
        """Stops serving."""
        if self._server:
            self._server.close()
