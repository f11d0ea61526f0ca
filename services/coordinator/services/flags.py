"""Builds the command-line flags that pass the run's metrics, tracing and log settings to the services it starts."""

import json
import logging
from contextlib import ExitStack

from services.common.config.reading.load import AnyConfig
from services.common.rpc.address import hold_free_port

log = logging.getLogger(__name__)

TARGETS = "prometheus.json"


class ServiceFlags:
    """Builds these flags for each started service, and lists the metrics pages for Prometheus."""

    def __init__(self, config: AnyConfig, host: str, ports: ExitStack):
        self._config, self._settings = config, config.observability
        self._host, self._ports = host, ports
        self._targets: list[dict[str, object]] = []

    def of(self, name: str) -> list[str]:
        """Returns the flags of the service `name`."""
        settings, flags = self._settings, []
        if settings.metrics_address:
            page = f"{self._host}:{hold_free_port(self._host, self._ports)}"
            self._add_target(page, name)
            flags += ["--metrics", page]
        flags += ["--otel", settings.otel_endpoint] if settings.otel_endpoint else []
        return [*flags, "--log-format", settings.log_format]

    def write_targets(self) -> None:
        """Writes the Prometheus target list (file_sd_configs): the services' metrics pages and the coordinator's."""
        if self._settings.metrics_address:
            self._add_target(self._settings.metrics_address, "coordinator")
            (self._config.run_dir / TARGETS).write_text(json.dumps(self._targets, indent=1) + "\n")

    def remove_targets(self) -> None:
        """Deletes the target list once the services have stopped. A disk that forbids it does not end the run."""
        path = self._config.run_dir / TARGETS
        try:
            if path.exists():  # a read-only disk refuses to delete also what is not there
                path.unlink()
        except OSError as error:
            log.warning("%s is of a run that has ended, and cannot be deleted: %s", path, error.strerror)

    def _add_target(self, page: str, name: str) -> None:
        labels = {"job": self._config.name, "lockstep_process": name}
        self._targets.append({"targets": [page], "labels": labels})
