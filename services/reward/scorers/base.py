"""What a scorer is. Imports nothing heavy: worker processes load this too."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class FailureReason(StrEnum):
    """Why a sample has no score; the names of lockstep.reward.v1.FailureReason."""

    TIMEOUT = "TIMEOUT"
    CRASHED = "CRASHED"
    INVALID_ANSWER = "INVALID_ANSWER"
    ERROR = "ERROR"


class ScoringError(Exception):
    """A sample has no score. Never turned into a number here: what it means is the run's `reward.on_failure`."""

    def __init__(self, reason: FailureReason, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Item:
    """One sample with the dataset row that it answers. `extra` is the other columns, as JSON values."""

    prompt: str
    answer: str
    extra: Mapping[str, Any]
    completion: str
    num_tokens: int
    finish_reason: str


class Scorer(ABC):
    """Scores samples, many at once. `version` changes whenever the same item could get another score."""

    version: str

    async def open(self) -> None:  # noqa: B027 most scorers have nothing to start
        """Starts what it needs.

        Raises:
            ScoringError: It cannot start.
        """

    @abstractmethod
    async def score(self, item: Item) -> float:
        """The finite raw score of `item`.

        Raises:
            ScoringError: There is none.
        """

    async def close(self) -> None:  # noqa: B027 nor to end
        """Ends it; scores in progress fail as CRASHED."""
