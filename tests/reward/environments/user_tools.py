"""Functions of a user that policies call; workers import this file by name."""

import asyncio
import os
import threading
from typing import Literal


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
    if how == "raise":
        raise RuntimeError("a bug")
    if how == "exit":
        os._exit(3)
    if how == "hang":
        threading.Event().wait()
    return object()


def takes_anything(*values: int) -> str:
    return str(values)


def takes_bytes(value: bytes) -> str:
    return str(value)
