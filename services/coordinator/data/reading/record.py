"""Defines the type of a row, apart from the code that reads rows, which imports pyarrow and is slow to load."""

from collections.abc import Mapping
from typing import Any

Record = Mapping[str, Any]
"""A row: column -> value, as Parquet or JSON has it."""
