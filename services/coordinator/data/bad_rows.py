"""Rows that cannot be used: named and counted, never passed over in silence."""

import logging
from dataclasses import dataclass, field
from typing import Literal

from services.common.errors import InvalidInput

NUM_NAMED = 5
"""How many rows a message names; it counts the others."""

_log = logging.getLogger(__name__)


class BadRow(ValueError):
    """This row cannot be used; the message says why. Caught by whoever knows the row's place."""


@dataclass
class BadRows:
    """Gathers what is wrong with the rows of one input."""

    what: str
    """The input, as a message names it."""
    problem: str
    """What is wrong with these rows, to follow "rows that are"."""
    fix: str
    """What to change."""
    rows: list[str] = field(default_factory=list)
    """`<place>: <reason>` of each."""

    def add(self, where: str, why: object) -> None:
        """Notes one row."""
        self.rows.append(f"{where}: {why}")

    def settle(self, policy: Literal["fail", "drop"], *, total: int, field: str) -> None:
        """Fails, or logs that the rows are dropped. Does nothing where there are none.

        Raises:
            InvalidInput: There are bad rows and `policy` is fail. Carries `bad_rows`, their count.
        """
        if not self.rows:
            return
        left = len(self.rows) - NUM_NAMED
        named = "; ".join(self.rows[:NUM_NAMED]) + (f"; and {left} more" if left > 0 else "")
        counted = f"{len(self.rows)} of {total} rows that are {self.problem}: {named}"
        if policy == "fail":
            raise InvalidInput(f"{self.what} has {counted}. {self.fix}", field=field, bad_rows=len(self.rows))
        _log.warning("%s: dropped %s", self.what, counted)
