"""Collects rows that cannot be used, so that they are named and counted and never skipped silently."""

import logging
from dataclasses import dataclass, field
from typing import Literal

from services.common.errors import InvalidInput

NUM_NAMED = 5
"""Number of bad rows that a message names; it only counts the others."""

_log = logging.getLogger(__name__)


class BadRow(ValueError):
    """Says why a row cannot be used. Callers that know the row's place catch it."""


@dataclass
class BadRows:
    """Collects the bad rows of one input."""

    what: str
    """Name of the input in messages."""
    problem: str
    """What is wrong with the rows; completes the phrase "rows that are ..."."""
    fix: str
    """Advice for the user."""
    rows: list[str] = field(default_factory=list)
    """`<place>: <reason>` of each bad row."""

    def add(self, where: str, why: object) -> None:
        """Adds one row."""
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
        counted = f"{len(self.rows)} of {total} rows that are {self.problem}: {named} (counted from 1)"
        if policy == "fail":
            raise InvalidInput(f"{self.what} has {counted}. {self.fix}", field=field, bad_rows=len(self.rows))
        _log.warning("%s: dropped %s", self.what, counted)
