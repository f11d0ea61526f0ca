"""Defines the trainer's Prometheus metrics."""

from contextlib import AbstractContextManager

import pyarrow as pa
import pyarrow.compute as pc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.common.rpc.server import SECONDS


class TrainerMetrics:
    """Collects the trainer's metrics. `Ranks` times the commands, and the servicer counts the rest."""

    def __init__(self, registry: CollectorRegistry | None = None):
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
        self.version = Gauge(
            "lockstep_trainer_version", "Number of batches that were applied to the role.", ["role"], registry=registry
        )

    def phase(self, name: str, role: str) -> AbstractContextManager[object]:
        """Measures the block, in which the ranks run the command `name` for `role`."""
        return self._seconds.labels(name, role).time()

    def trained(self, role: str, samples: pa.Table) -> None:
        """Counts the tokens of `samples` (common.batches.SAMPLE_SCHEMA), which were applied to `role`."""
        for part, column in (("prompt", "prompt_tokens"), ("completion", "tokens")):
            num_tokens = pc.sum(pc.list_value_length(samples[column])).as_py() or 0
            self._tokens.labels(role, part).inc(num_tokens)

    def sent(self, num_bytes: int, duration_s: float) -> None:
        self._bytes.inc(num_bytes)
        self._publication_seconds.observe(duration_s)
