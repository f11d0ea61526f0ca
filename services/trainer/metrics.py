"""What Prometheus is told of training."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.compute as pc
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric

from services.common.rpc.metrics import SECONDS


class TrainerMetrics:
    """Counted by the ranks' caller and the servicer."""

    def __init__(self, registry: CollectorRegistry | None = None):
        self._registry = registry
        self._versions: Callable[[], Mapping[str, int]] = dict
        self._seconds = Histogram(
            "lockstep_trainer_phase_seconds",
            "Time that all ranks took for forward, train, send, save and the rest, without waiting for their turn.",
            ["phase", "role"],
            buckets=SECONDS,
            registry=registry,
        )
        self._tokens = Counter(
            "lockstep_trainer_trained_tokens_total",
            "Tokens of the batches that were applied: prompts, and completions.",
            ["role", "part"],
            registry=registry,
        )
        self._bytes = Counter(
            "lockstep_trainer_publication_bytes_total", "Bytes of weights that were sent.", registry=registry
        )
        self._publication_seconds = Histogram(
            "lockstep_trainer_publication_seconds",
            "Time to gather, send and verify one publication.",
            buckets=SECONDS,
            registry=registry,
        )

    def watch(self, versions: Callable[[], Mapping[str, int]]) -> None:
        """`versions` says what each role holds, when Prometheus asks, from another thread."""
        self._versions = versions
        if self._registry:
            self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """What the roles hold."""
        version = GaugeMetricFamily("lockstep_trainer_version", "Updates that were applied.", labels=["role"])
        for role, number in self._versions().items():
            version.add_metric([role], number)
        yield version

    @contextmanager
    def phase(self, name: str, role: str) -> Iterator[None]:
        """The ranks do `name`, from here to the end of the block."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds.labels(name, role).observe(time.perf_counter() - begin)

    def trained(self, role: str, samples: pa.Table) -> None:
        """`samples` (common.batch.SAMPLE_SCHEMA) have been applied."""
        for part, column in (("prompt", "prompt_tokens"), ("completion", "tokens")):
            num_tokens = pc.sum(pc.list_value_length(samples[column])).as_py() or 0
            self._tokens.labels(role, part).inc(num_tokens)

    def sent(self, num_bytes: int, duration_s: float) -> None:
        """A publication has been received by all."""
        self._bytes.inc(num_bytes)
        self._publication_seconds.observe(duration_s)
