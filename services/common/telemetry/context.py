"""Tracks the context of the current work: its run, step, group and span. Contextvars hold it; every call sends it.

On the wire it is two standard headers: `traceparent` (W3C Trace Context) and `baggage` (W3C Baggage).
"""

import datetime
import json
import logging
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Literal, TypeVar
from urllib.parse import quote, unquote

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


class _Text(logging.Formatter):
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
