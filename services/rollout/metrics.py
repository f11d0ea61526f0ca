"""Prometheus metrics of the rollout service. Apart from the servicer, so that they can be listed without vLLM."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lockstep.types.v1.types_pb2 import PolicyStamp
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric

from services.common.config.rollout import RolloutConfig
from services.common.rpc.server import SECONDS


@dataclass(frozen=True)
class State:
    """The current state of a replica."""

    samples_in_flight: int
    max_samples: int
    stamp: PolicyStamp | None


def with_statistics(config: RolloutConfig) -> RolloutConfig:
    """Returns a config that turns on vLLM's own metrics, unless `rollout.engine` says otherwise."""
    return config.model_copy(update={"engine": {"disable_log_stats": False} | config.engine})


class RolloutMetrics:
    """Metrics that the servicer updates, and gauges that another thread reads from `state` at every scrape."""

    def __init__(self, registry: CollectorRegistry | None, state: Callable[[], State]):
        self._state = state
        self.tokens = Counter(
            "lockstep_rollout_generated_tokens_total", "Tokens of finished completions.", registry=registry
        )
        self.published_bytes = Counter(
            "lockstep_rollout_publication_bytes_total", "Bytes of weights received.", registry=registry
        )
        self.publication_seconds = Histogram(
            "lockstep_rollout_publication_seconds",
            "Time to receive, load and verify one publication.",
            buckets=SECONDS,
            registry=registry,
        )
        if registry:
            registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yields the gauges of the replica, and vLLM's own metrics if they are on."""
        state = self._state()
        yield GaugeMetricFamily(
            "lockstep_rollout_in_flight_samples",
            "Samples that were given to the engine and are not finished.",
            state.samples_in_flight,
        )
        yield GaugeMetricFamily(
            "lockstep_rollout_queue_samples",
            "Samples in flight beyond the number that the engine runs concurrently.",
            max(0, state.samples_in_flight - state.max_samples),
        )
        version = GaugeMetricFamily(
            "lockstep_rollout_served_version", "Policy version that is served; absent if there is none."
        )
        digest = InfoMetricFamily(
            "lockstep_rollout_served", "Stamp of the weights that are served; absent if there are none."
        )
        if state.stamp:
            version.add_metric([], state.stamp.version)
            digest.add_metric([], {"version": str(state.stamp.version), "digest": state.stamp.digest})
        yield from (version, digest)
        yield from (metric for metric in REGISTRY.collect() if metric.name.startswith("vllm:"))
