"""Defines the datasets that can be converted and the options, which the command line needs before it converts
anything."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from services.coordinator.data.prepare.deepscaler import DEEPSCALER
from services.coordinator.data.prepare.formats import Format
from services.coordinator.data.prepare.gsm8k import GSM8K

FORMATS: Mapping[str, Format] = {format.name: format for format in (GSM8K, DEEPSCALER)}


@dataclass(frozen=True)
class ConversionOptions:
    """Holds the options of a conversion."""

    bad_rows: Literal["fail", "drop"] = "fail"
    test_size: int = 500
    """Number of distinct problems to hold out as test if the source has no test split; 0 for none."""
    instruction: str | None = None
    """Text to append to each problem; None for the format's own, empty for nothing."""
    revision: str | None = None
    """Commit, tag or branch on the Hub."""
