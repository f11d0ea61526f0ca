"""Defines the types of rows, apart from the code that reads rows, which imports pyarrow and is slow to load."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

Record = Mapping[str, Any]
"""A row: column -> value, as Parquet or JSON has it. A key that a row of JSON does not have is missing."""

MAX_DEPTH = 500
"""Levels of lists and objects in a row. Python's parser of JSON takes twice as many, less those of its callers."""

_TEXT = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")


@dataclass(frozen=True)
class Unusable:
    """Stands for a value that JSON or Python cannot hold. It matters only to those who read its column."""

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
    steps: Iterator[int] = (1 if found[0] in "[{" else -1 for found in _BRACKET.finditer(_TEXT.sub("", text)))
    return max(accumulate(steps), default=0)
