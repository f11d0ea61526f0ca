"""Exports a run's metrics to Prometheus."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import Counter, Gauge, Histogram, Info
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from services.common.rpc.metrics import SECONDS
from services.common.telemetry.metrics_server import Metrics
from services.coordinator.runs.reporter import ReplicaCounts, Reporter


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

    @contextmanager
    def phase(self, name: str, version: int) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._phase_seconds.labels(name).observe(time.perf_counter() - begin)

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
