"""The page that Prometheus reads. Each process has a registry of its own; names of metrics end with their unit."""

import logging
from dataclasses import dataclass
from importlib.metadata import version
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Info, ProcessCollector, disable_created_metrics, start_http_server

from services.common.errors import InvalidInput
from services.common.rpc.address import parse_address, require_loopback
from services.common.rpc.server import INCARNATION

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Page:
    """Where metrics are served: nowhere, if `address` is empty."""

    address: str = ""
    insecure: bool = False
    field: str = "--metrics"
    consent: str = "pass --metrics-insecure"
    """How to ask for another interface than loopback."""


class Metrics:
    """The registry of a process, which knows what the process is, and its page.

    Raises:
        InvalidInput: The page's address is malformed or not loopback.
    """

    def __init__(self, service: str, page: Page = Page()):
        self._page = page
        self._server: WSGIServer | None = None
        if page.address:
            self._host, self._port = parse_address(page.address, field=page.field)
            require_loopback(self._host, insecure=page.insecure, field=page.field, consent=page.consent)
        disable_created_metrics()  # they would be a second series for each counter: when it was made
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        about = Info("lockstep_service", "What the process is.", registry=self.registry)
        about.info({"service": service, "version": version("lockstep-rl"), "incarnation": INCARNATION})

    @property
    def is_served(self) -> bool:
        """Whether there is a page, or will be."""
        return bool(self._page.address)

    def serve(self) -> int:
        """Answers http://HOST:PORT/metrics from a thread, if there is an address; the port, of which 0 picks one.

        Raises:
            InvalidInput: The port is in use or the host is not this one.
        """
        if not self._page.address:
            return 0
        try:
            self._server, _ = start_http_server(self._port, self._host, self.registry)
        except OSError as error:
            raise InvalidInput(f"{self._page.field} {self._page.address}: {error}", field=self._page.field) from error
        log.info("metrics on http://%s:%d/metrics", self._host, self._server.server_port)
        return self._server.server_port

    def close(self) -> None:
        """Closes the page."""
        if self._server:
            self._server.shutdown()
            self._server.server_close()
