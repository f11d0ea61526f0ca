"""Functions of a user that policies call; workers import this file by name."""

import asyncio
import datetime
import decimal
import os
import sqlite3
import sys
import threading
from typing import Literal

import numpy as np

from services.reward.environments.base import EnvironmentFailure, EpisodeError


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C") -> dict[str, object]:
    """Forecasts the weather.

    Of any city.

    Args:
        city: Name of the city,
            in English.
        days (int): Number of days.

    Returns:
        A forecast.
    """
    if city == "Atlantis":
        raise ValueError("no such city")
    return {"city": city, "days": days, "unit": unit}


async def add(numbers: list[float], label: str | None = None) -> str:
    """Adds numbers."""
    await asyncio.sleep(0)
    if not numbers:
        raise ValueError("nothing to add")
    return f"{label or 'sum'}: {sum(numbers)}"


def echo(text: str) -> str:
    return text


def breaks(how: str) -> object:
    """Fails."""
    if how == "give up":
        raise EpisodeError(EnvironmentFailure.REFUSED, "the database is gone")
    if how == "memory":
        raise MemoryError
    if how == "return inside":
        return [{"a": object()}]
    if how == "exit":
        os._exit(3)
    if how == "hang":
        threading.Event().wait()
    return object()


def raises(how: str) -> str:
    """Raises an exception."""
    return _raise(how)


async def raises_later(how: str) -> str:
    """Raises an exception."""
    await asyncio.sleep(0)
    return _raise(how)


def _raise(how: str) -> str:
    if how == "sql":
        sqlite3.connect(":memory:").execute("SELEC 1")
    if how == "key":
        return {}["missing"]
    if how == "stop":
        return next(iter([]))
    if how == "assert":
        raise AssertionError
    if how == "exit":
        sys.exit("bad arguments")
    if how in ("value", "empty"):
        raise ValueError("no such value" if how == "value" else "")
    raise RuntimeError("a bug" if how == "raise" else "x" * 10_000)


def returns(how: str) -> object:
    """Returns what is no text."""
    inside: list[object] = []
    inside.append(inside)
    results = {
        "bytes": b"caf\xe9",
        "none": None,
        "nan": {"a": float("nan"), "b": float("inf")},
        "numpy": {"a": np.array([[1, 2]]), "b": np.float32(1.5), "c": np.bool_(True)},
        "date": [datetime.date(2026, 1, 2), decimal.Decimal("1.50"), b"caf\xe9"],
        "keys": {(1, 2): 3},
        "inside itself": inside,
        "surrogate": ["\ud800"],
        "set": {1},
        "huge": 10**5000,
    }
    return results[how]


def repeat(text: str, times: int) -> str:
    return text * times


def typed(ids: list[int], level: Literal[1, 2] = 1, label: str = None, number: float | int = 0.5) -> str:  # noqa: RUF013
    return f"{ids} {level} {label} {number}"


def think(thought: str) -> str:
    return thought


def takes_anything(*values: int) -> str:
    return str(values)


def takes_bytes(value: bytes) -> str:
    return str(value)
