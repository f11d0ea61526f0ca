"""What a row is, and which rows are bad; apart from the code that reads rows, because pyarrow is slow to import."""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from services.common.errors import InvalidInput
from services.common.json_values import JsonMapping

Record = JsonMapping
"""A row: column -> value, as Parquet or JSON has it. A key that a row of JSON does not have is missing."""

MAX_DEPTH = 500
"""Levels of lists and objects in a row. Python's parser of JSON takes twice as many, less those of its callers."""

_TEXT = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")


@dataclass(frozen=True)
class Unusable:
    """A value that JSON or Python cannot hold. It matters only to those who read its column."""

    why: str
    """What it is, such as "NaN, which is not JSON"."""


def in_words(value: object) -> str:
    """Returns what a value of a row is, for messages."""
    if isinstance(value, Unusable):
        return value.why
    if isinstance(value, bool):
        return "true or false"
    kinds = {str: "text", list: "a list", dict: "an object", int: "a number", float: "a number", type(None): "null"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def depth_of(text: str) -> int:
    """Returns how deeply a text of JSON nests; 0 if it cannot be deeper than MAX_DEPTH."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return 0
    steps: Iterator[int] = (1 if bracket[0] in "[{" else -1 for bracket in _BRACKET.finditer(_TEXT.sub("", text)))
    return max(accumulate(steps), default=0)


NUM_NAMED = 5
"""Number of bad rows that a message names; it only counts the others."""

_log = logging.getLogger(__name__)


class BadRow(ValueError):
    """Why a row cannot be used. Callers that know the row's place catch it."""


@dataclass
class BadRows:
    """The bad rows of one input."""

    what: str
    """Name of the input in messages."""
    problem: str
    """What is wrong with the rows; completes the phrase "rows that are ..."."""
    fix: str
    rows: list[str] = field(default_factory=list)
    """`<place>: <reason>` of each bad row."""

    def add(self, where: str, why: object) -> None:
        self.rows.append(f"{where}: {why}")

    def settle(self, policy: Literal["fail", "drop"], *, total: int, field: str) -> None:
        """Raises, or logs that the bad rows were dropped, depending on `policy`. Does nothing if there are none.

        Raises:
            InvalidInput: There are bad rows and `policy` is "fail". Its metadata has `bad_rows`, their number.
        """
        if not self.rows:
            return
        left = len(self.rows) - NUM_NAMED
        named = "; ".join(self.rows[:NUM_NAMED]) + (f"; and {left} more" if left > 0 else "")
        bad_of_all = f"{len(self.rows)} of {total} rows that are {self.problem}: {named} (counted from 1)"
        if policy == "fail":
            raise InvalidInput(f"{self.what} has {bad_of_all}. {self.fix}", field=field, bad_rows=len(self.rows))
        _log.warning("%s: dropped %s", self.what, bad_of_all)
