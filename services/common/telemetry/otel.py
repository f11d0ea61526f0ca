"""Sends spans to an OpenTelemetry collector, with or without the trace file of services/common/telemetry/trace.py."""

from collections.abc import Generator
from contextlib import contextmanager
from importlib.metadata import version
from urllib.parse import urlsplit

from services.common.errors import InvalidInput
from services.common.telemetry.context import TRACEPARENT, scoped

# An unreachable collector must not delay the exit of a process: services are killed 10 s after they are asked to end.
_TIMEOUT_S = 5.0


class Otel:
    """Sends spans over OTLP/gRPC, from a thread. The parent of a span is the current span, here or at the caller.

    Raises:
        InvalidInput: The endpoint is not a URL, or the extra `otel` is not installed.
    """

    def __init__(self, endpoint: str, process: str, instance: str, *, field: str):
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidInput(f"{field}: {endpoint!r} is not http://HOST:PORT or https://HOST:PORT", field=field)
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise InvalidInput(
                f"{field}: {error.name} is not installed; pip install 'lockstep-rl[otel]'", field=field
            ) from error
        exporter = OTLPSpanExporter(endpoint, insecure=parts.scheme == "http", timeout=_TIMEOUT_S)
        names = {"service.name": process, "service.instance.id": instance, "service.version": version("lockstep-rl")}
        # Private to this object, because vLLM and other libraries may set a global provider.
        self._provider = TracerProvider(resource=Resource.create(names))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("lockstep")
        self._headers = TraceContextTextMapPropagator()

    @contextmanager
    def span(self, name: str, **arguments: object) -> Generator[None]:
        """Records the block as a span, the parent of all spans in the block and in the services that it calls."""
        from opentelemetry.trace import StatusCode, set_span_in_context

        parent = self._headers.extract({"traceparent": TRACEPARENT.get()})
        plain = {key: value if isinstance(value, int | float) else str(value) for key, value in arguments.items()}
        span = self._tracer.start_span(name, context=parent, attributes=plain)
        header: dict[str, str] = {}
        self._headers.inject(header, set_span_in_context(span))
        try:
            with scoped(TRACEPARENT, header["traceparent"]):
                yield
        except BaseException as error:  # cancellation too
            span.set_status(StatusCode.ERROR, f"{type(error).__name__}: {error}")
            raise
        finally:
            span.end()

    def close(self) -> None:
        """Sends the remaining spans."""
        self._provider.shutdown()
