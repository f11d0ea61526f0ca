"""What a scorer is. Imports nothing heavy: worker processes load this too."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from services.common.tasks import gather


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


class Scorer:
    """Scores samples, many at once. `version` changes whenever the same item could get another score.

    A scorer has either `score`, for one sample, or `score_group`, for all samples of a prompt group together.
    """

    version: str

    async def open(self) -> None:
        """Starts what it needs.

        Raises:
            ScoringError: It cannot start.
        """

    async def score(self, item: Item) -> float:
        """The finite raw score of `item`.

        Raises:
            ScoringError: There is none.
        """
        raise NotImplementedError

    async def score_group(self, items: Sequence[Item]) -> list[float | ScoringError]:
        """Finite raw scores, or why there is none, in the order of `items`; by default each item by itself.

        Raises:
            ScoringError: None of them has a score.
        """
        return await gather(self._score_or_error(item) for item in items)

    async def close(self) -> None:
        """Ends it; scores in progress fail as CRASHED."""

    async def _score_or_error(self, item: Item) -> float | ScoringError:
        try:
            return await self.score(item)
        except ScoringError as error:
            return error
