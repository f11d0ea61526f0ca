"""What differs from one public dataset to the next."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from services.coordinator.data.bad_rows import BadRow

Split = Literal["train", "test"]
Record = Mapping[str, Any]
"""One row of a dataset as it is published."""


@dataclass(frozen=True, slots=True)
class Example:
    """One problem. `solution` is the worked answer, or empty."""

    problem: str
    answer: str
    solution: str


@dataclass(frozen=True)
class Format:
    """A dataset: where it is published, which files it has, and how to read a row."""

    name: str
    hub_id: str
    files: Mapping[Split, tuple[str, ...]]
    """Globs of each published split; of several, the first that matches a file is taken."""
    instruction: str
    """Tells the model how to answer, after the problem, so that the scorer of this dataset finds the answer."""
    parse: Callable[[Record], Example]
    """Reads one row, or raises BadRow."""


def text(record: Record, column: str) -> str:
    """`column` of `record`, stripped.

    Raises:
        BadRow: It is missing, not text, or empty.
    """
    if column not in record:
        raise BadRow(f"no column {column}, only {', '.join(record)}")
    value = record[column]
    if not isinstance(value, str):
        raise BadRow(f"{column} is {'null' if value is None else type(value).__name__}, not text")
    if not value.strip():
        raise BadRow(f"{column} is empty")
    return value.strip()
