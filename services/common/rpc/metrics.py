"""Defines the Prometheus metrics of the calls that a server answers."""

import asyncio
import time
from collections.abc import Generator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram

from services.common.errors import LockstepError, Reason

SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0, 1800.0)
"""Bucket upper bounds of all histograms, in seconds. A call may take a millisecond or half an hour."""


class RpcMetrics:
    """Counts and times the calls that a server answers."""

    def __init__(self, registry: CollectorRegistry | None):
        self._started = Counter(
            "lockstep_rpc_started_total", "Calls that were received.", ["method"], registry=registry
        )
        self._seconds = Histogram(
            "lockstep_rpc_seconds",
            "Time from receiving a call to its end.",
            ["method"],
            registry=registry,
            buckets=SECONDS,
        )
        self._finished = Counter(
            "lockstep_rpc_finished_total",
            "Calls that ended, by gRPC status code.",
            ["method", "code"],
            registry=registry,
        )
        self._failures = Counter(
            "lockstep_rpc_failures_total",
            "Calls that failed, by typed reason.",
            ["method", "reason"],
            registry=registry,
        )

    @contextmanager
    def call(self, method: str) -> Generator[None]:
        """Counts and times the block as one call."""
        self._started.labels(method).inc()
        begin, code, reason = time.perf_counter(), "OK", ""
        try:
            yield
        except LockstepError as error:
            code, reason = error.code.name, error.reason.value
            raise
        except (asyncio.CancelledError, GeneratorExit):  # also when the deadline has passed
            code = "CANCELLED"
            raise
        except Exception:
            code, reason = "INTERNAL", Reason.INTERNAL.value
            raise
        finally:
            self._seconds.labels(method).observe(time.perf_counter() - begin)
            self._finished.labels(method, code).inc()
            if reason:
                self._failures.labels(method, reason).inc()
