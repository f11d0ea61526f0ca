"""Serves metrics to Prometheus. Each process has its own registry; the name of a metric ends with its unit."""

import contextlib
import logging
import socket
import threading
from dataclasses import dataclass
from importlib.metadata import version
from typing import ClassVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, Info, ProcessCollector, disable_created_metrics, start_http_server

from services.common.errors import InvalidInput
from services.common.rpc.address import parse_address, require_loopback
from services.common.rpc.server import incarnation

log = logging.getLogger(__name__)


# One more connection closes the oldest, so that idle ones neither keep anybody out nor take ever more threads.
_MAX_CONNECTIONS = 64


class Handler(WSGIRequestHandler):
    """Answers one connection, in a thread of its own."""

    timeout = 10.0  # of silence, after which the connection is closed
    _open: ClassVar[dict[socket.socket, None]] = {}  # the oldest first

    def handle(self) -> None:
        self._open[self.connection] = None
        for oldest in list(self._open)[:-_MAX_CONNECTIONS]:
            with contextlib.suppress(OSError):  # it ends by itself at this moment
                oldest.shutdown(socket.SHUT_RDWR)
        try:
            with contextlib.suppress(OSError):  # the client is gone, sends nothing, or does not read
                super().handle()
        finally:
            self._open.pop(self.connection, None)

    def log_message(self, format: str, *args: object) -> None: ...


@dataclass(frozen=True)
class Page:
    """Where metrics are served; an empty `address` serves none."""

    address: str = ""
    insecure: bool = False
    field: str = "--metrics"
    consent: str = "pass --metrics-insecure"
    """What an error message tells the user to do to allow another interface than loopback."""


class Metrics:
    """The metrics registry of a process, and the server of its page."""

    def __init__(self, service: str, page: Page = Page()):
        self._page, self.is_served = page, bool(page.address)
        self._server: tuple[WSGIServer, threading.Thread] | None = None
        if page.address:
            self._host, self._port = parse_address(page.address, field=page.field)
            require_loopback(self._host, insecure=page.insecure, field=page.field, consent=page.consent)
        disable_created_metrics()  # would add a second series to each counter: its creation time
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        about = Info("lockstep_service", "Name, version and incarnation of the service.", registry=self.registry)
        about.info({"service": service, "version": version("lockstep-rl"), "incarnation": incarnation()})

    def serve(self) -> int:
        """Serves http://HOST:PORT/metrics from a thread, if there is an address.

        Returns the port, which is a free one if the address has port 0; 0 if nothing is served.
        """
        if not self._page.address:
            return 0
        try:
            server, thread = start_http_server(self._port, self._host, self.registry)
        except OSError as error:
            raise InvalidInput(f"{self._page.field} {self._page.address}: {error}", field=self._page.field) from error
        server.RequestHandlerClass = Handler
        server.socket.listen(2 * _MAX_CONNECTIONS)  # with the standard library's 5, waiting clients retry after seconds
        self._server = server, thread
        log.info("metrics on http://%s:%d/metrics", self._host, server.server_port)
        return server.server_port

    def close(self) -> None:
        if self._server:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()
