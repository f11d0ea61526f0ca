"""Reads what a process exports about itself, as Prometheus and an OpenTelemetry collector do."""

import contextlib
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from tests.support import PATIENCE_S

Labels = frozenset[tuple[str, str]]


def scrape(address: str) -> dict[str, dict[Labels, float]]:
    """Returns the values that the metrics page at `address` has now, as `parse` does."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE_S) as answer:
        return parse(answer.read().decode())


def parse(text: str) -> dict[str, dict[Labels, float]]:
    """Returns the values on a metrics page, by the name of the sample and by its labels."""
    values: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return values


def value(metrics: Mapping[str, Mapping[Labels, float]], name: str, /, **labels: str) -> float:
    """Returns the value of the one sample with exactly these labels."""
    return metrics[name][frozenset(labels.items())]


@dataclass
class Service:
    """Holds a started service, and the lines that were read from its stderr so far."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def until(self, pattern: str) -> re.Match[str]:
        """Reads lines until one matches `pattern`, and returns the match."""
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            if match := re.search(pattern, line):
                return match
        raise AssertionError("\n".join(["the service ended:", *self.lines]))

    def end(self) -> list[str]:
        """Asks the service to end, and returns all of its lines."""
        self.process.terminate()
        _, rest = self.process.communicate(timeout=PATIENCE_S)
        self.lines += rest.splitlines()
        return self.lines


@contextlib.contextmanager
def reward_service(*flags: str, cwd: Path | None = None, ulimit: str = "") -> Iterator[Service]:
    """Runs `python -m services.reward` on a free port, within the limits that bash's `ulimit` sets."""
    limited = ["bash", "-c", f'ulimit {ulimit} && exec "$@"', "bash"] if ulimit else []
    command = [*limited, sys.executable, "-m", "services.reward", "--listen", "127.0.0.1:0", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=cwd)
    try:
        yield Service(process)
    finally:
        process.kill()
        process.communicate()


@dataclass(frozen=True)
class Span:
    """Holds one of the spans that a collector has received."""

    process: str
    name: str
    trace: str
    id: str
    parent: str
    attributes: Mapping[str, Any]
    is_error: bool


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps all spans. It answers from a thread, because a process that sends its last spans waits for nothing else."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            process = _plain(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self.spans += [_span(process, span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@contextlib.contextmanager
def otlp_collector() -> Iterator[tuple[Collector, str]]:
    """Runs a collector, and yields it and its URL."""
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield collector, f"http://127.0.0.1:{port}"
    server.stop(0).wait()


def _span(process: str, span: Any) -> Span:
    ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
    return Span(process, span.name, *ids, _plain(span.attributes), span.status.code == 2)


def _plain(attributes: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in attributes}
