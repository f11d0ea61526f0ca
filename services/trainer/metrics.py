"""Defines the trainer's Prometheus metrics."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.compute as pc
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric

from services.common.rpc.server import SECONDS


class TrainerMetrics:
    """Collects the trainer's metrics. `Ranks` times the commands, and the servicer counts the rest."""

    def __init__(self, registry: CollectorRegistry | None = None):
        self._registry = registry
        self._versions: Callable[[], Mapping[str, int]] = dict
        self._seconds = Histogram(
            "lockstep_trainer_phase_seconds",
            "Time that a command (forward, apply_batch, send, save, ...) took on all ranks, without time in the queue.",
            ["phase", "role"],
            buckets=SECONDS,
            registry=registry,
        )
        self._tokens = Counter(
            "lockstep_trainer_trained_tokens_total",
            "Prompt and completion tokens of the batches that were applied.",
            ["role", "part"],
            registry=registry,
        )
        self._bytes = Counter(
            "lockstep_trainer_publication_bytes_total", "Bytes of weights that were published.", registry=registry
        )
        self._publication_seconds = Histogram(
            "lockstep_trainer_publication_seconds",
            "Time to gather, send and verify one publication.",
            buckets=SECONDS,
            registry=registry,
        )

    def watch(self, versions: Callable[[], Mapping[str, int]]) -> None:
        """Reports the version of each role from `versions`, which is called in another thread at every scrape."""
        self._versions = versions
        if self._registry:
            self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yields the version of each role. The registry calls this at every scrape."""
        version = GaugeMetricFamily(
            "lockstep_trainer_version", "Number of batches that were applied to the role.", labels=["role"]
        )
        for role, number in self._versions().items():
            version.add_metric([role], number)
        yield version

    @contextmanager
    def phase(self, name: str, role: str) -> Iterator[None]:
        """Measures the block, in which the ranks run the command `name` for `role`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds.labels(name, role).observe(time.perf_counter() - begin)

    def trained(self, role: str, samples: pa.Table) -> None:
        """Counts the tokens of `samples` (common.batches.batch.SAMPLE_SCHEMA), which were applied to `role`."""
        for part, column in (("prompt", "prompt_tokens"), ("completion", "tokens")):
            num_tokens = pc.sum(pc.list_value_length(samples[column])).as_py() or 0
            self._tokens.labels(role, part).inc(num_tokens)

    def sent(self, num_bytes: int, duration_s: float) -> None:
        self._bytes.inc(num_bytes)
        self._publication_seconds.observe(duration_s)
