"""What watches a run from its begin to its end, as the config section `observability` says."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing

from services.common.config.run import Config
from services.common.rpc.ports import hold_free_port
from services.common.telemetry.metrics_server import Metrics, Page
from services.coordinator.observe.prometheus import Prometheus
from services.coordinator.observe.reporters import Reporter
from services.coordinator.observe.trace import RunTrace
from services.coordinator.observe.trackers import open_tracker
from services.coordinator.runs.run import Run

TARGETS = "prometheus.json"


def watchers(run: Run) -> list[Reporter]:
    """Begun before the services are: what cannot be had is an error before anybody waits for a model.

    Raises:
        InvalidInput: An address is wrong or taken, or an extra is not installed.
    """
    found: list[Reporter] = []
    with ExitStack() as opened:
        for watcher in _open(run):
            found.append(opened.enter_context(closing(watcher)))
        opened.pop_all()  # all are there, and the run's to close
    return found


def _open(run: Run) -> Iterator[Reporter]:
    settings = run.config.observability
    if run.config.trace or settings.otel_endpoint:
        yield RunTrace(run.config)
    if settings.metrics_address:
        consent = "set observability.metrics_insecure=true"
        page = Page(settings.metrics_address, settings.metrics_insecure, "observability.metrics_address", consent)
        yield Prometheus(Metrics("coordinator", page), run.run_id)
    for tracker in settings.trackers:
        yield open_tracker(tracker, run)


class ServiceFlags:
    """Command-line flags that have the started services watched like the run."""

    def __init__(self, config: Config, host: str, ports: ExitStack):
        self._config, self._settings = config, config.observability
        self._host, self._ports = host, ports
        self._targets: list[dict[str, object]] = []

    def of(self, name: str) -> list[str]:
        """Those of the service `name`."""
        settings, flags = self._settings, []
        if settings.metrics_address:
            page = f"{self._host}:{hold_free_port(self._host, self._ports)}"
            self._add_target(page, name)
            flags += ["--metrics", page]
        flags += ["--otel", settings.otel_endpoint] if settings.otel_endpoint else []
        return [*flags, "--log-format", settings.log_format]

    def write_targets(self) -> None:
        """Tells Prometheus where the pages are (file_sd_configs): those of the flags, and the coordinator's."""
        if self._settings.metrics_address:
            self._add_target(self._settings.metrics_address, "coordinator")
            (self._config.run_dir / TARGETS).write_text(json.dumps(self._targets, indent=1) + "\n")

    def remove_targets(self) -> None:
        """The pages are gone."""
        (self._config.run_dir / TARGETS).unlink(missing_ok=True)

    def _add_target(self, page: str, name: str) -> None:
        labels = {"job": self._config.name, "lockstep_process": name}
        self._targets.append({"targets": [page], "labels": labels})
