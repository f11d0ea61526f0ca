"""What can fail in scoring and in playing, and the log's memory of tracebacks.

Imports nothing heavy, because worker processes load this too.
"""

import hashlib
from enum import StrEnum
from typing import Generic, TypeVar

Reason = TypeVar("Reason", bound=StrEnum)

_MAX_TRACEBACKS = 100
"""How many different tracebacks are written per run; one for each sample could fill the disk."""


class FailureReason(StrEnum):
    """Why a sample has no score, by the names of lockstep.reward.v1.FailureReason."""

    TIMEOUT = "TIMEOUT"
    CRASHED = "CRASHED"
    INVALID_ANSWER = "INVALID_ANSWER"
    ERROR = "ERROR"


class EnvironmentFailure(StrEnum):
    """Why an environment could not reply, by the names of lockstep.reward.v1.EnvironmentFailureReason."""

    TIMEOUT = "TIMEOUT"
    CRASHED = "CRASHED"
    REFUSED = "REFUSED"
    INVALID_REPLY = "INVALID_REPLY"
    NEIGHBOR = "NEIGHBOR"


class WorkError(Exception, Generic[Reason]):
    """Work on a sample or an episode failed.

    `traceback` is that of the exception that the user's code raised in its worker process; empty without one.
    """

    def __init__(self, reason: Reason, detail: str, traceback: str = ""):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.traceback = traceback


class ScoringError(WorkError[FailureReason]):
    """A sample has no score. It never becomes a number here; `reward.on_failure` says how the run treats it."""


class EpisodeError(WorkError[EnvironmentFailure]):
    """The environment failed, not the policy. The episode is over, and nothing is rewarded.

    `alone` says that the episode hung in a process that others shared, or ended it: it should be played again alone.
    """

    def __init__(self, reason: EnvironmentFailure, detail: str, traceback: str = "", *, alone: bool = False):
        super().__init__(reason, detail, traceback)
        self.alone = alone


class Tracebacks:
    """Gives each traceback of a run to the log once."""

    def __init__(self) -> None:
        self._written: set[bytes] = set()

    def once(self, traceback: str) -> str:
        """Returns the traceback on lines of its own if it is new, otherwise an empty text."""
        digest = hashlib.sha256(traceback.encode(errors="replace")).digest()
        if not traceback or digest in self._written or len(self._written) >= _MAX_TRACEBACKS:
            return ""
        self._written.add(digest)
        return f"\n{traceback}"
