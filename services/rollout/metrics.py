"""What Prometheus is told of sampling. Imports nothing heavy."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lockstep.types.v1.types_pb2 import PolicyStamp
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric

from services.common.config.rollout import RolloutConfig
from services.common.rpc.metrics import SECONDS


@dataclass(frozen=True)
class State:
    """Of a replica, now."""

    samples_in_flight: int
    max_samples: int
    stamp: PolicyStamp | None


def with_statistics(config: RolloutConfig) -> RolloutConfig:
    """A config with which vLLM counts what it does, unless `rollout.engine` says otherwise."""
    return config.model_copy(update={"engine": {"disable_log_stats": False} | config.engine})


class RolloutMetrics:
    """Counted by the servicer; what is true only now, `state` says when Prometheus asks, from another thread."""

    def __init__(self, registry: CollectorRegistry | None, state: Callable[[], State]):
        self._state = state
        self.tokens = Counter("lockstep_rollout_generated_tokens_total", "Tokens of completions.", registry=registry)
        self.published_bytes = Counter(
            "lockstep_rollout_publication_bytes_total", "Bytes of weights that were received.", registry=registry
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
        """What the replica does and serves; and vLLM's own, if it counts."""
        state = self._state()
        in_flight = ("lockstep_rollout_in_flight_samples", "Samples that the engine was given and has not finished.")
        yield GaugeMetricFamily(*in_flight, state.samples_in_flight)
        queue = ("lockstep_rollout_queue_samples", "Of these, more than the engine runs at once.")
        yield GaugeMetricFamily(*queue, max(0, state.samples_in_flight - state.max_samples))
        version = GaugeMetricFamily("lockstep_rollout_served_version", "Policy version that is served, if any is.")
        digest = InfoMetricFamily("lockstep_rollout_served", "Stamp of the weights that are served, if any are.")
        if state.stamp:
            version.add_metric([], state.stamp.version)
            digest.add_metric([], {"version": str(state.stamp.version), "digest": state.stamp.digest})
        yield from (version, digest)
        yield from (metric for metric in REGISTRY.collect() if metric.name.startswith("vllm:"))
