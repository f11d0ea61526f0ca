"""Creates the reporters that follow a run from start to end, according to the config section `observability`."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

from prometheus_client import Counter, Gauge, Histogram, Info
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from services.common.config.load import AnyConfig
from services.common.rpc.metrics_server import Metrics, Page
from services.common.rpc.server import INCARNATION, SECONDS
from services.common.telemetry.trace import Otel, Trace, join
from services.coordinator.observe.trackers import open_tracker
from services.coordinator.runs.reporter import ReplicaCounts, Reporter
from services.coordinator.runs.run import Run


class Prometheus(Reporter):
    """Serves `metrics` for the duration of the run."""

    def __init__(self, metrics: Metrics, run_id: str):
        self._metrics, registry = metrics, metrics.registry
        self._rollout: ReplicaCounts | None = None
        Info("lockstep_coordinator_run", "Id of the run.", registry=registry).info({"run_id": run_id})
        self._step = Gauge("lockstep_coordinator_step", "Finished steps.", registry=registry)
        self._step_seconds = Gauge(
            "lockstep_coordinator_step_seconds", "Duration of the last finished step.", registry=registry
        )
        self._phase_seconds = Histogram(
            "lockstep_coordinator_phase_seconds",
            "Duration of each phase of the loop: generating, training, publishing, ...",
            ["phase"],
            buckets=SECONDS,
            registry=registry,
        )
        self._reward = Gauge("lockstep_coordinator_reward_mean", "Mean reward of the last batch.", registry=registry)
        self._tokens = Counter(
            "lockstep_coordinator_batch_tokens_total", "Tokens of all batches trained on.", registry=registry
        )
        self._numbers = Gauge(
            "lockstep_coordinator_number",
            "Every metric of the last step and evaluation, by its name in metrics.jsonl.",
            ["name"],
            registry=registry,
        )
        registry.register(self)
        metrics.serve()

    def collect(self) -> Iterator[Metric]:
        """Yields the current state of the replicas."""
        rollout = self._rollout
        num_dead, redispatched = (rollout.num_dead, rollout.num_redispatched) if rollout else (0, 0)
        dead = ("lockstep_coordinator_dead_replicas", "Replicas that were lost and have not come back.")
        yield GaugeMetricFamily(*dead, num_dead)
        again = (
            "lockstep_coordinator_redispatched_groups_total",
            "Prompt groups sent to another replica after one did not finish them.",
        )
        yield CounterMetricFamily(*again, redispatched)

    def watch(self, rollout: ReplicaCounts) -> None:
        self._rollout = rollout

    def end_phase(self, name: str, seconds: float) -> None:
        self._phase_seconds.labels(name).observe(seconds)

    def step(self, version: int, metrics: dict[str, float]) -> None:
        self._step.set(version)
        self._step_seconds.set(metrics["time/step_s"])
        self._tokens.inc(metrics["batch/tokens"])
        if "reward/mean" in metrics:  # an SFT run has none
            self._reward.set(metrics["reward/mean"])
        self.evaluation(version, metrics)

    def evaluation(self, version: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._numbers.labels(name).set(value)

    def close(self) -> None:
        self._metrics.close()


def trace_path(run_dir: Path, name: str) -> Path:
    """Returns the file for the spans of the process `name`, and creates its directory."""
    directory = run_dir / "trace"
    directory.mkdir(parents=True, exist_ok=True)
    return (directory / f"{name}.json").absolute()


class RunTrace(Reporter):
    """Opens the trace that the run's clock writes. At the end, joins all spans of the run in trace.json."""

    def __init__(self, run: Run[AnyConfig]):
        config, self._run_dir = run.config, run.config.run_dir if run.config.trace else None
        path = trace_path(self._run_dir, "coordinator") if self._run_dir else ""
        endpoint, field = config.observability.otel_endpoint, "observability.otel_endpoint"
        otel = Otel(endpoint, "lockstep-coordinator", INCARNATION, field=field) if endpoint else None
        self._trace = run.clock.trace = Trace(path, "coordinator", otel)

    def close(self) -> None:
        self._trace.close()
        if self._run_dir:
            join(sorted((self._run_dir / "trace").glob("*.json")), self._run_dir / "trace.json")


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
        yield RunTrace(run)
    if settings.metrics_address:
        consent = "set observability.metrics_insecure=true"
        page = Page(settings.metrics_address, settings.metrics_insecure, "observability.metrics_address", consent)
        yield Prometheus(Metrics("coordinator", page), run.run_id)
    for tracker in settings.trackers:
        yield open_tracker(tracker, run)
