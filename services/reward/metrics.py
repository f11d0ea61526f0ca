"""What Prometheus is told of scoring."""

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge


class RewardMetrics:
    """Counted by the servicer and the run."""

    def __init__(self, registry: CollectorRegistry | None = None):
        self._scores = Counter(
            "lockstep_reward_scores_total",
            "Samples by scorer and outcome: scored, or why there is no score.",
            ["scorer", "outcome"],
            registry=registry,
        )
        self._queue = Gauge(
            "lockstep_reward_queue_samples", "Samples that were received and not answered yet.", registry=registry
        )

    def count(self, scorer: str, outcome: str) -> None:
        """One sample has been graded by one scorer."""
        self._scores.labels(scorer, outcome).inc()

    @contextmanager
    def scoring(self, num_samples: int) -> Iterator[None]:
        """These samples wait for their answer, from here to the end of the block."""
        self._queue.inc(num_samples)
        try:
            yield
        finally:
            self._queue.dec(num_samples)
