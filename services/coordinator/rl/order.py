"""Decides which groups of a batch come next, as soon as that is certain: in the order of prompts or of lengths."""

import math
from bisect import insort
from collections.abc import Iterable, Mapping
from itertools import takewhile

from services.coordinator.data.groups import ScoredGroup


class ByPrompt:
    """Orders groups by their prompts. The next group is certain when all before it are decided."""

    def __init__(self) -> None:
        self._decided: dict[int, ScoredGroup | None] = {}
        self._next = 0

    def begin(self, place: int, prompt_id: str) -> None:
        """Does nothing, because this order does not depend on the groups that have begun."""

    def decide(self, place: int, group: ScoredGroup | None) -> list[ScoredGroup]:
        """Takes the group at `place` in the order of prompts, None if it is not trained on. Returns what comes next."""
        self._decided[place] = group
        certain: list[ScoredGroup] = []
        while self._next in self._decided:
            if useful := self._decided.pop(self._next):
                certain.append(useful)
            self._next += 1
        return certain


class ByLength:
    """Orders groups by the length of their longest completion, which is about the order in which they are finished.

    The next group is certain when all groups of the batch have begun and all unfinished ones are known to be longer.
    """

    def __init__(self, num_groups: int, lengths: Mapping[str, int]):
        """Creates the order of `num_groups` groups; `lengths` has a lower bound of each one's length, by prompt id."""
        self._num_to_begin, self._lengths = num_groups, lengths
        self._unfinished: dict[int, str] = {}
        self._waiting: list[ScoredGroup] = []

    def begin(self, place: int, prompt_id: str) -> None:
        """Takes note of a prompt that is sampled."""
        self._unfinished[place] = prompt_id
        self._num_to_begin -= 1

    def decide(self, place: int, group: ScoredGroup | None) -> list[ScoredGroup]:
        """Takes the group at `place` in the order of prompts, None if it is not trained on. Returns what comes next."""
        del self._unfinished[place]
        if group:
            insort(self._waiting, group, key=_by_length)
        if self._num_to_begin:
            return []
        least = min((self._lengths.get(prompt_id, 0) for prompt_id in self._unfinished.values()), default=math.inf)
        certain = list(takewhile(lambda waiting: waiting.length < least, self._waiting))
        del self._waiting[: len(certain)]
        return certain


def in_order_of_length(groups: Iterable[ScoredGroup]) -> list[ScoredGroup]:
    """Returns `groups` in the order of `ByLength`."""
    return sorted(groups, key=_by_length)


def _by_length(group: ScoredGroup) -> tuple[int, int]:
    return group.length, group.index
