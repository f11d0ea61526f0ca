"""Defines the Prometheus metrics of the reward service."""

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge


class RewardMetrics:
    """Counts and gauges that the servicer and the scoring run update."""

    def __init__(self, registry: CollectorRegistry | None = None):
        self._scores = Counter(
            "lockstep_reward_scores_total",
            "Samples by scorer and outcome: scored, or the reason why there is no score.",
            ["scorer", "outcome"],
            registry=registry,
        )
        self._queue = Gauge(
            "lockstep_reward_queue_samples", "Samples that were received and are not scored yet.", registry=registry
        )

    def count(self, scorer: str, outcome: str) -> None:
        """Counts one sample that one scorer has finished, with its outcome."""
        self._scores.labels(scorer, outcome).inc()

    @contextmanager
    def scoring(self, num_samples: int) -> Iterator[None]:
        """Counts the samples as queued until the end of the block."""
        self._queue.inc(num_samples)
        try:
            yield
        finally:
            self._queue.dec(num_samples)
