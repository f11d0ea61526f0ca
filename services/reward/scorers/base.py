"""Defines the interface of scorers. Imports nothing heavy, because worker processes load this too."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from services.reward.errors import ScoringError

Result = TypeVar("Result")


@dataclass(frozen=True)
class Item:
    """Holds one sample with the dataset row that it answers. `extra` has the row's other columns, as JSON values."""

    prompt: str
    answer: str
    extra: Mapping[str, object]
    completion: str
    num_tokens: int
    finish_reason: str


class Scorer:
    """Scores samples, many concurrently. `version` must change whenever the same item could get a different score.

    A scorer implements either `score`, for one sample, or `score_group`, for all samples of a prompt group together.
    """

    version: str

    async def open(self) -> None:
        """Starts what the scorer needs.

        Raises:
            ScoringError: The scorer cannot start.
        """

    async def score(self, item: Item) -> float:
        """Returns the raw score of `item`, a finite number.

        Raises:
            ScoringError: The item has no score.
        """
        raise NotImplementedError

    async def score_group(self, items: Sequence[Item]) -> list[float | ScoringError]:
        """Returns a finite raw score or an error per item, in order. By default, calls `score` for each item.

        Raises:
            ScoringError: No item has a score.
        """
        return expected(await asyncio.gather(*(self.score(item) for item in items), return_exceptions=True))

    async def close(self) -> None:
        """Closes the scorer; scores in progress fail as CRASHED."""


def expected(results: Sequence[Result | BaseException]) -> list[Result | ScoringError]:
    """Returns the results if every error among them is a ScoringError; raises the first other one."""
    checked: list[Result | ScoringError] = []
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, ScoringError):
            raise result
        checked.append(result)
    return checked


def share_s(group_timeout_s: float, *, num_samples: int, num_slots: int) -> float:
    """Returns how long each of `num_samples` may take, `num_slots` at once, so that a group ends in its time limit."""
    return group_timeout_s / math.ceil(num_samples / num_slots)
