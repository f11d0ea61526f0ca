"""Creates the reporters that follow a run from start to end, according to the config section `observability`."""

from collections.abc import Iterator
from contextlib import ExitStack, closing

from services.common.config.reading.load import AnyConfig
from services.common.telemetry.metrics_server import Metrics, Page
from services.coordinator.observe.prometheus import Prometheus
from services.coordinator.observe.trace import RunTrace
from services.coordinator.observe.trackers import open_tracker
from services.coordinator.runs.reporter import Reporter
from services.coordinator.runs.run import Run


def watchers(run: Run[AnyConfig]) -> list[Reporter]:
    """Creates the reporters before any service starts, so that a bad setting fails before a model is loaded.

    Raises:
        InvalidInput: An address is invalid or in use, or an extra is not installed.
    """
    found: list[Reporter] = []
    with ExitStack() as opened:
        for watcher in _open(run):
            found.append(opened.enter_context(closing(watcher)))
        opened.pop_all()  # all were created; the run closes them
    return found


def _open(run: Run[AnyConfig]) -> Iterator[Reporter]:
    settings = run.config.observability
    if run.config.trace or settings.otel_endpoint:
        yield RunTrace(run.config)
    if settings.metrics_address:
        consent = "set observability.metrics_insecure=true"
        page = Page(settings.metrics_address, settings.metrics_insecure, "observability.metrics_address", consent)
        yield Prometheus(Metrics("coordinator", page), run.run_id)
    for tracker in settings.trackers:
        yield open_tracker(tracker, run)
