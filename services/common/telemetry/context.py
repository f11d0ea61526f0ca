"""What the work in progress belongs to: its run, step, group and span. Kept by contextvars, sent with every call.

On the wire it is two headers that other tools know too: `traceparent` (W3C Trace Context) and `baggage` (W3C Baggage).
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import TypeVar
from urllib.parse import quote, unquote

Value = TypeVar("Value")

FIELDS: Mapping[str, Callable[[str], object]] = {"run": str, "step": int, "group": str, "sample": int}
"""Run id, policy version, prompt id, index in the group."""
_MAX_CHARACTERS = 128

TRACEPARENT: ContextVar[str] = ContextVar("lockstep_traceparent", default="")
"""Header of the span in progress, empty without OpenTelemetry."""
_fields: ContextVar[Mapping[str, object]] = ContextVar("lockstep_fields", default=MappingProxyType({}))


@contextmanager
def scoped(variable: ContextVar[Value], value: Value) -> Generator[None]:
    """Sets `variable` for a block."""
    before = variable.get()
    variable.set(value)
    try:
        yield
    finally:
        variable.set(before)  # not by token: an async generator may be closed in another context


@contextmanager
def within(**fields: object) -> Generator[None]:
    """What happens in the block belongs to these of FIELDS, and to those around it."""
    with scoped(_fields, {**_fields.get(), **fields}):
        yield


def fields() -> Mapping[str, object]:
    """What the caller's work belongs to."""
    return _fields.get()


def outgoing() -> tuple[tuple[str, str], ...]:
    """gRPC metadata for a call."""
    known = {name: quote(str(value)[:_MAX_CHARACTERS], safe="") for name, value in _fields.get().items()}
    baggage = ",".join(f"{name}={value}" for name, value in known.items())
    headers = (("traceparent", TRACEPARENT.get()), ("baggage", baggage))
    return tuple((name, value) for name, value in headers if value)


@contextmanager
def incoming(metadata: Iterable[tuple[str, str | bytes]]) -> Generator[None]:
    """The block belongs to what the caller's work belongs to."""
    headers = dict(metadata)
    with scoped(TRACEPARENT, str(headers.get("traceparent", ""))), within(**_parse(str(headers.get("baggage", "")))):
        yield


def _parse(baggage: str) -> dict[str, object]:
    """Only what is known, and fit for a line of a log: the caller may be anybody."""
    found: dict[str, object] = {}
    for member in baggage.split(","):
        name, _, quoted = member.partition("=")
        value = unquote(quoted.partition(";")[0].strip())
        if (parse := FIELDS.get(name.strip())) and 0 < len(value) <= _MAX_CHARACTERS and value.isprintable():
            try:
                found[name.strip()] = parse(value)
            except ValueError:
                continue
    return found
