"""Defines the Prometheus metrics of the reward service."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


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
        self._episodes = Gauge(
            "lockstep_reward_episodes_open", "Episodes that hold something of the environment.", registry=registry
        )
        self._environment_seconds = Histogram(
            "lockstep_reward_environment_seconds",
            "Seconds that the environment took for a reset or a step.",
            ["call"],
            registry=registry,
        )
        self._environment_failures = Counter(
            "lockstep_reward_environment_failures_total",
            "Episodes that the environment failed to begin or to continue, by reason.",
            ["reason"],
            registry=registry,
        )

        self._tool_calls = Counter(
            "lockstep_reward_tool_calls_total",
            "Calls of tools by outcome: ok, malformed, refused (no such tool, or wrong arguments), or the class of the "
            "exception that the tool raised.",
            ["outcome"],
            registry=registry,
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

    def count_episodes(self, change: Literal[1, -1]) -> None:
        """Counts an episode that begins (1) or has ended (-1)."""
        self._episodes.inc(change)

    def count_environment_failure(self, reason: str) -> None:
        """Counts one failure of the environment."""
        self._environment_failures.labels(reason.lower()).inc()

    def count_tool_calls(self, outcomes: Sequence[str]) -> None:
        """Counts calls of tools by what became of them."""
        for outcome in outcomes:
            self._tool_calls.labels(outcome).inc()

    def observe_environment(self, call: Literal["reset", "step"], seconds: float) -> None:
        """Records how long the environment took for one call."""
        self._environment_seconds.labels(call).observe(seconds)
