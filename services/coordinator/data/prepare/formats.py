"""Describes the format of a public dataset."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from services.coordinator.data.reading.bad_rows import BadRow
from services.coordinator.data.reading.record import Record

Split = Literal["train", "test"]


@dataclass(frozen=True, slots=True)
class Example:
    """Holds one problem. `solution` is the worked solution, or empty."""

    problem: str
    answer: str
    solution: str


@dataclass(frozen=True)
class Format:
    """Describes a dataset: its id on the Hub, its files and the function that reads a row."""

    name: str
    hub_id: str
    files: Mapping[Split, tuple[str, ...]]
    """Globs of each published split; the first one that matches a file is used."""
    instruction: str
    """Text after the problem that tells the model how to answer, so that this dataset's scorer finds the answer."""
    parse: Callable[[Record], Example]
    """Reads one row. Raises BadRow if it cannot be used."""


def text(record: Record, column: str) -> str:
    """Returns `column` of `record` without surrounding white space.

    Raises:
        BadRow: The column is missing, not text, or empty.
    """
    if column not in record:
        raise BadRow(f"no column {column}, only {', '.join(record)}")
    value = record[column]
    if not isinstance(value, str):
        raise BadRow(f"{column} is {'null' if value is None else type(value).__name__}, not text")
    if not value.strip():
        raise BadRow(f"{column} is empty")
    return value.strip()
