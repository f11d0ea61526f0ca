"""Remembers which tracebacks of the user's code a run's log already has."""

import hashlib

_MAX_TRACEBACKS = 100
"""How many different tracebacks are written per run; one for each sample could fill the disk."""


class Tracebacks:
    """Gives each traceback to the log once."""

    def __init__(self) -> None:
        self._written: set[bytes] = set()

    def once(self, traceback: str) -> str:
        """Returns the traceback on lines of its own if it is new, otherwise an empty text."""
        digest = hashlib.sha256(traceback.encode(errors="replace")).digest()
        if not traceback or digest in self._written or len(self._written) >= _MAX_TRACEBACKS:
            return ""
        self._written.add(digest)
        return f"\n{traceback}"
