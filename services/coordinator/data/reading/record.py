"""The type of a row, apart from what reads it: the command line needs it, and pyarrow is slow to import."""

from collections.abc import Mapping
from typing import Any

Record = Mapping[str, Any]
"""A row: column -> value, as Parquet or JSON has it."""
