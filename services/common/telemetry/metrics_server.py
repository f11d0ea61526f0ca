"""Serves metrics to Prometheus. Each process has its own registry; the name of a metric ends with its unit."""

import logging
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
from services.common.telemetry.page_server import PageServer

log = logging.getLogger(__name__)


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
