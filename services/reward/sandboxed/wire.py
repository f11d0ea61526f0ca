"""Carries values between the process that runs a test and the one that runs the program, as lines of JSON.

Plain data is copied: None, numbers, text, bytes, lists, tuples, sets, dicts, and the types of `_STANDARD`. An object of
any other type stays in its process, and the other process gets a number that stands for it. Nothing is unpickled, and
reading a line calls no code of the sender.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

OPERATORS = ("eq", "ne", "lt", "le", "gt", "ge", "getitem", "setitem", "delitem", "contains", "add", "sub", "mul")
"""Functions of the module operator that the program can run on an object of the test, besides a few built-ins."""
_MAX_INT_BITS = 10_000  # json reads no decimal numbers above 4300 digits
_STANDARD: dict[str, Callable[..., tuple]] = {
    "builtins.complex": lambda value: (value.real, value.imag),
    "builtins.range": lambda value: (value.start, value.stop, value.step),
    "builtins.slice": lambda value: (value.start, value.stop, value.step),
    "collections.Counter": lambda value: (dict(value),),
    "collections.OrderedDict": lambda value: (list(value.items()),),
    "collections.deque": lambda value: (list(value), value.maxlen),
    "datetime.date": lambda value: (value.year, value.month, value.day),
    "datetime.datetime": lambda value: (*value.timetuple()[:6], value.microsecond, value.tzinfo),
    "datetime.time": lambda value: (value.hour, value.minute, value.second, value.microsecond, value.tzinfo),
    "datetime.timedelta": lambda value: (value.days, value.seconds, value.microseconds),
    "datetime.timezone": lambda value: (value.utcoffset(None),),
    "decimal.Decimal": lambda value: (str(value),),
    "fractions.Fraction": lambda value: (value.numerator, value.denominator),
    "uuid.UUID": lambda value: (str(value),),
}
"""Maps the name of each type of the standard library to a function that returns the arguments of an equal value."""


def write_line(descriptor: int, message: dict) -> None:
    line = memoryview(json.dumps(message).encode() + b"\n")
    while line:
        line = line[os.write(descriptor, line) :]


class Peer:
    """Exchanges messages with the other process."""

    def __init__(self, read_end: int, write_end: int):
        self._requests, self._write_end = os.fdopen(read_end, "rb"), write_end

    def send(self, message: dict) -> None:
        write_line(self._write_end, message)

    def receive(self) -> dict:
        """Raises EOFError if the other process has ended."""
        line = self._requests.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return json.loads(line)


def pack(value: Any, refer: Callable[[object], dict]) -> object:
    """Returns `value` as JSON. `refer` returns what stands for an object that is not plain data."""
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:
        return value if value.bit_length() < _MAX_INT_BITS else {"int": hex(value)}
    if kind is list:
        return [pack(entry, refer) for entry in value]
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name in _STANDARD:
        return {"standard": [name, [pack(entry, refer) for entry in _STANDARD[name](value)]]}
    if kind.__module__.partition(".")[0] not in sys.stdlib_module_names:
        return refer(value)
    return _pack_plain(value, refer)


_READ: dict[type, Callable[[Any], Any]] = {
    int: int.__index__,
    float: float.__float__,
    complex: complex.__pos__,
    str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    bytearray: lambda value: bytearray.__getitem__(value, slice(None)),
    list: lambda value: list(list.__iter__(value)),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    set: lambda value: set(set.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
    dict: lambda value: dict(dict.items(value)),
}
"""Maps each plain type to a function that reads a value of a class that derives from it, as the plain type does."""


def to_plain(value: object, *kinds: type) -> object:
    """Returns an object whose class derives from a plain type (of `kinds`) as that type, or raises TypeError."""
    for plain in kinds or _READ:
        if issubclass(type(value), plain):
            return _READ[plain](value)
    raise TypeError(f"a {type(value).__name__} is not plain data")


def _pack_plain(value: Any, refer: Callable[[object], dict]) -> object:
    if isinstance(value, bytes | bytearray):
        return {"bytearray" if isinstance(value, bytearray) else "bytes": value.hex()}
    if isinstance(value, dict):
        return {"dict": [[pack(key, refer), pack(entry, refer)] for key, entry in value.items()]}
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [pack(entry, refer) for entry in value]}
    if isinstance(value, int | float | str | list):
        return pack(to_plain(value), refer)
    return refer(value)


def unpack(message: object, resolve: Callable[[dict], object]) -> object:
    """Returns the value that `pack` was given. `resolve` returns the object for what `refer` returned."""
    if isinstance(message, list):
        return [unpack(entry, resolve) for entry in message]
    if not isinstance(message, dict):
        return message
    ((tag, content),) = message.items()
    match tag:
        case "int":
            return int(content, 16)
        case "bytes" | "bytearray":
            return (bytes if tag == "bytes" else bytearray).fromhex(content)
        case "dict":
            return {unpack(key, resolve): unpack(entry, resolve) for key, entry in content}
        case "tuple" | "set" | "frozenset":
            kind = {"tuple": tuple, "set": set, "frozenset": frozenset}[tag]
            return kind(unpack(entry, resolve) for entry in content)
        case "standard":
            name, arguments = content
            module, _, kind = name.rpartition(".")
            if name not in _STANDARD:
                raise ValueError(f"{name} is not passed")
            return getattr(importlib.import_module(module), kind)(*(unpack(entry, resolve) for entry in arguments))
    return resolve(message)


def pack_error(error: BaseException, refer: Callable[[object], dict]) -> dict:
    """Returns an exception as JSON: its class, the built-in class that it derives from, and its
    arguments."""
    kind = type(error)
    builtin = next(base.__name__ for base in kind.__mro__ if base.__module__ == "builtins")
    try:
        arguments = [pack(argument, refer) for argument in error.args]
    except Exception:  # noqa: BLE001 an argument can be any object, whose code may raise anything
        arguments = []
    return {"kind": name_of(kind) or refer(kind), "builtin": builtin, "args": arguments}


def name_of(kind: type) -> str:
    """Returns the name of an exception of Python's, with its module if that is not builtins; "" if it is another's."""
    if kind.__module__ == "builtins":
        return kind.__name__
    return f"{kind.__module__}.{kind.__name__}" if kind.__module__.partition(".")[0] in sys.stdlib_module_names else ""
