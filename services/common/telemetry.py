"""Tracks the context of the current work (its run, step, group and span), and writes spans and logs with it.

Contextvars hold it, and every call sends it in two standard headers: `traceparent` (W3C Trace Context) and `baggage`
(W3C Baggage). Spans of a process are written to a file for Perfetto or chrome://tracing (in the Trace Event Format).
"""

import datetime
import itertools
import json
import logging
import os
import re
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TextIO, TypeVar
from urllib.parse import quote, unquote, urlsplit

from services.common.errors import InvalidInput

Value = TypeVar("Value")

FIELDS: Mapping[str, Callable[[str], object]] = {"run": str, "step": int, "group": str, "sample": int}
"""Maps each field to its parser: run id, policy version, prompt id, index in the group."""
_MAX_CHARACTERS = 128

TRACEPARENT: ContextVar[str] = ContextVar("lockstep_traceparent", default="")
"""`traceparent` header of the current span; empty without OpenTelemetry."""
_fields: ContextVar[Mapping[str, object]] = ContextVar("lockstep_fields", default=MappingProxyType({}))


@contextmanager
def scoped(variable: ContextVar[Value], value: Value) -> Generator[None]:
    """Sets `variable` inside the block."""
    before = variable.get()
    variable.set(value)
    try:
        yield
    finally:
        variable.set(before)  # not reset(token), because an async generator may be closed in another context


@contextmanager
def within(**fields: object) -> Generator[None]:
    """Adds `fields`, which are keys of FIELDS, to the context of the work in the block."""
    with scoped(_fields, {**_fields.get(), **fields}):
        yield


def fields() -> Mapping[str, object]:
    return _fields.get()


def outgoing() -> tuple[tuple[str, str], ...]:
    """Returns the gRPC metadata that sends the current context with a call."""
    known = {name: quote(str(value)[:_MAX_CHARACTERS], safe="") for name, value in _fields.get().items()}
    baggage = ",".join(f"{name}={value}" for name, value in known.items())
    headers = (("traceparent", TRACEPARENT.get()), ("baggage", baggage))
    return tuple((name, value) for name, value in headers if value)


@contextmanager
def incoming(metadata: Iterable[tuple[str, str | bytes]]) -> Generator[None]:
    """Gives the work in the block the context that a caller sent in `metadata`."""
    headers = dict(metadata)
    with scoped(TRACEPARENT, str(headers.get("traceparent", ""))), within(**_parse(str(headers.get("baggage", "")))):
        yield


def _parse(baggage: str) -> dict[str, object]:
    """Parses the known fields, if short and printable. The header is untrusted and its fields go into log lines."""
    known: dict[str, object] = {}
    for member in baggage.split(","):
        name, _, quoted = member.partition("=")
        value = unquote(quoted.partition(";")[0].strip())
        if (parse := FIELDS.get(name.strip())) and 0 < len(value) <= _MAX_CHARACTERS and value.isprintable():
            try:
                known[name.strip()] = parse(value)
            except ValueError:
                continue
    return known


LogFormat = Literal["text", "json"]


def formatter(kind: LogFormat, service: str = "") -> logging.Formatter:
    """Returns a formatter of one line per record: time, level, service, logger, message, and run, step and group."""
    return _Json(service) if kind == "json" else _Text(service)


_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def inert(text: str) -> str:
    """Returns a text with U+FFFD for each character that could control a terminal or reorder what it shows."""
    return _CONTROLS.sub("\ufffd", text)


class InertFormatter(logging.Formatter):
    """Keeps words that are not Lockstep's, such as an agent's, from acting on a terminal and from passing for a record:
    only a record begins at the left."""

    def format(self, record: logging.LogRecord) -> str:
        return inert(super().format(record)).replace("\n", "\n  ")


class _Text(InertFormatter):
    def __init__(self, service: str):
        super().__init__(" ".join(filter(None, ("%(asctime)s %(levelname).1s", service, "%(name)s: %(message)s"))))

    def formatMessage(self, record: logging.LogRecord) -> str:
        known = " ".join(f"{name}={value}" for name, value in fields().items())
        return super().formatMessage(record) + (f"  [{known}]" if known else "")


class _Json(logging.Formatter):
    def __init__(self, service: str):
        super().__init__()
        self._service = {"service": service} if service else {}

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname, **self._service, "logger": record.name}
        line |= {"message": record.getMessage(), **fields()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


log = logging.getLogger(__name__)

# An unreachable collector must not delay the exit of a process: services are killed 10 s after they are asked to end.
_TIMEOUT_S = 5.0


class Span:
    """A block of work with its begin and end, so that the trace, the metrics and OpenTelemetry get the same times."""

    def __init__(self, name: str, **arguments: object):
        self.name, self.arguments = name, arguments
        self.began_ns, self.began_s = time.time_ns(), time.perf_counter()
        self._ended_s: float | None = None

    def end(self) -> float:
        """Ends the span if it has not ended yet. Returns when it ended, in seconds of `time.perf_counter`."""
        if self._ended_s is None:
            self._ended_s = time.perf_counter()
        return self._ended_s

    @property
    def seconds(self) -> float:
        return self.end() - self.began_s

    @property
    def ended_ns(self) -> int:
        return self.began_ns + round(self.seconds * 1e9)


_EXPORTERS = ("opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.sdk._shared_internal")


class _FirstFailure(logging.Filter):
    """Lets only the first failure to send spans into the log; the library reports each, and every retry."""

    is_known = False

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR:
            return not record.getMessage().startswith("Transient error")
        if self.is_known:
            return False
        self.is_known = True
        record.msg, record.args = "spans cannot be sent and are lost meanwhile: %s", (record.getMessage(),)
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        return True


_first_failure = _FirstFailure()


class Otel:
    """Sends spans over OTLP/gRPC, from a thread. The parent of a span is the current span, here or at the caller."""

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
        _first_failure.is_known = False
        for name in _EXPORTERS:
            logging.getLogger(name).addFilter(_first_failure)
        self._tracer = self._provider.get_tracer("lockstep")
        self._headers = TraceContextTextMapPropagator()

    @contextmanager
    def send(self, span: Span) -> Generator[None]:
        """Sends `span`, which is the block: the parent of all spans in it and in the services that it calls."""
        from opentelemetry.trace import StatusCode, set_span_in_context

        parent = self._headers.extract({"traceparent": TRACEPARENT.get()})
        plain = {key: value if isinstance(value, int | float) else str(value) for key, value in span.arguments.items()}
        sent = self._tracer.start_span(span.name, context=parent, attributes=plain, start_time=span.began_ns)
        header: dict[str, str] = {}
        self._headers.inject(header, set_span_in_context(sent))
        try:
            with scoped(TRACEPARENT, header["traceparent"]):
                yield
        except BaseException as error:  # cancellation too
            sent.set_status(StatusCode.ERROR, f"{type(error).__name__}: {error}")
            raise
        finally:
            sent.end(span.ended_ns)

    def close(self) -> None:
        self._provider.shutdown()


class Trace:
    """Appends spans to `path`, a JSON array without its closing bracket, so that a killed process leaves a valid trace.

    Times are of the host's clock, so that the files of several processes can be joined. With an empty path no file is
    written. The same spans are sent to `otel`, if given.
    """

    def __init__(self, path: str | Path, process: str, otel: Otel | None = None):
        self._path, self._process, self._otel = path, process, otel
        self._file: TextIO | None = None
        self._numbers = itertools.count()

    @contextmanager
    def span(self, name: str, **arguments: object) -> Generator[Span]:
        """Records the block as a span; spans may overlap."""
        span, number = Span(name, **arguments), {"local": str(next(self._numbers))}
        self._write(ph="b", name=name, id2=number, args=arguments, ts=span.began_ns / 1e3)
        try:
            with scoped(_current, self), self._otel.send(span) if self._otel else nullcontext():
                yield span
        finally:
            self._write(ph="e", name=name, id2=number, ts=span.ended_ns / 1e3)

    def close(self) -> None:
        """Closes the file, which gets no more spans: a process may have a trace for each of many runs."""
        file, self._path, self._file = self._file, "", None
        if file is not None:
            file.close()
        if self._otel:
            self._otel.close()

    def _write(self, **event: object) -> None:
        if not self._path:
            return
        try:
            self._append(event)
        except OSError as error:  # the program must not fail because its trace does
            log.warning("%s gets no more spans: %s", self._path, error)
            self._path = ""

    def _append(self, event: dict[str, object]) -> None:
        if self._file is None:
            self._file = open(self._path, "a", buffering=1)  # noqa: SIM115 `close` closes it
            self._file.write("\n" if self._file.tell() else "[\n")  # a full disk may have cut the last line
            self._append({"ph": "M", "name": "process_name", "args": {"name": self._process}})
        common = {"cat": "lockstep", "pid": os.getpid(), "tid": 0}
        self._file.write(json.dumps(common | event) + ",\n")


NO_TRACE = Trace("", "")
_current: ContextVar[Trace] = ContextVar("lockstep_trace", default=NO_TRACE)


def span(name: str, **arguments: object) -> AbstractContextManager[Span]:
    """Records the block as a span in the trace of the current span; does nothing if there is none."""
    return _current.get().span(name, **arguments)


def join(paths: list[Path], to: Path) -> None:
    """Writes the spans of the files `paths` to the file `to`, as one JSON array."""
    with to.open("w", encoding="utf-8") as joined:
        joined.write("[\n")
        for number, event in enumerate(_events(paths)):
            joined.write(f",\n{event}" if number else event)
        joined.write("\n]\n")


def _events(paths: list[Path]) -> Iterator[str]:
    """Yields one event after the other: those of a long run do not fit into memory."""
    for path in paths:
        with path.open(encoding="utf-8") as lines:
            yield from filter(_is_event, (line.rstrip(",\n") for line in lines))


def _is_event(line: str) -> bool:
    """Returns whether a line is an event; others are empty, brackets or cut off."""
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
