"""Selects the groups that a step trains on. The choice does not depend on timing, unless `keep: arrival` is set.

Prompts are tried in a fixed order (data/prompts.py); the batch is the first `prompts_per_step` useful groups in that
order. `prompts_per_step` x `over_sampling.factor` prompts are sampled concurrently. When a group turns out to be
useless, the next prompt takes its place immediately. With factor 1 no more prompts are tried than the batch needs.
"""

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, count, islice, takewhile
from typing import NamedTuple, Protocol

import numpy as np

from services.common.config.layout import samples_at_once
from services.common.config.run import Config
from services.common.errors import LockstepError, Reason
from services.common.rewards import all_equal, reaches
from services.common.tasks import task_group
from services.coordinator.data.groups import ScoredGroup
from services.coordinator.data.prompts import Prompt

log = logging.getLogger(__name__)

# (index in the order of prompts, prompt) -> scored group, or None if it has no score.
DrawOne = Callable[[int, Prompt], Awaitable[ScoredGroup | None]]


class Follower(Protocol):
    """Follows a selection. Places are those in the order of prompts; with `keep: arrival`, decisions count arrivals."""

    def begin(self, place: int, prompt: Prompt) -> None: ...  # the prompt is sampled

    def decide(self, place: int, group: ScoredGroup | None) -> None: ...  # None if the group is not useful


class Drop(StrEnum):
    NO_SCORE = "no_score"
    ALL_TRUNCATED = "all_truncated"
    ZERO_VARIANCE = "zero_variance"


@dataclass(frozen=True)
class Selected:
    """The groups of a batch, the record of how they were chosen, and the outcomes that the curriculum uses."""

    groups: Sequence[ScoredGroup]
    decision: Mapping[str, object]
    """The record for the ledger, as JSON values."""
    metrics: dict[str, float]
    outcomes: dict[str, tuple[int, int]]
    """(samples, samples that passed) by prompt id; empty without a curriculum."""


async def select(
    config: Config,
    prompts: Iterator[Prompt],
    draw: DrawOne,
    follower: Follower | None = None,
    why_no_score: Callable[[], str] = lambda: "see the log",
) -> Selected:
    """Samples distinct `prompts` with `draw`, in their order, until there are enough useful groups.

    `follower` is told of every prompt and group. `why_no_score` returns the last cause of a group without a score, for
    the message of an error.

    Raises:
        LockstepError: TOO_FEW_GROUPS if too few groups are useful; or as `draw`.
    """
    selection = _Selection(config, prompts, draw, follower, why_no_score)
    with contextlib.suppress(_EnoughError):
        async with task_group() as tasks:
            for _ in range(selection.at_once):
                tasks.create_task(selection.fill_one_place())
    return selection.result()


class _EnoughError(Exception):
    """Cancels the draws in progress when the batch is complete."""


class _Attempt(NamedTuple):
    prompt: Prompt
    group: ScoredGroup | None
    drop: Drop | None


class _Selection:
    def __init__(
        self,
        config: Config,
        prompts: Iterator[Prompt],
        draw: DrawOne,
        follower: Follower | None,
        why_no_score: Callable[[], str],
    ):
        self._config, self._draw, self._follower, self._why_no_score = config, draw, follower, why_no_score
        self._wanted, dynamic = config.data.prompts_per_step, config.selection.dynamic
        self.at_once = config.selection.over_sampling.at_once(self._wanted)
        most = int(self._wanted * dynamic.max_rounds + 1e-9)  # 100 * 1.15 is a little less than 115
        budget = max(self.at_once, most) if dynamic.enabled else self.at_once  # at_once is rounded up
        self._next = islice(enumerate(prompts), budget)
        self._tried: dict[int, _Attempt] = {}  # index in the order of prompts -> result, in the order of arrival
        self._num_started = self._num_useful = 0
        self._by_arrival = config.selection.over_sampling.keep == "arrival"

    async def fill_one_place(self) -> None:
        # All places take from this one iterator, so the next prompt in order replaces a group that was dropped.
        for index, prompt in self._next:
            self._num_started += 1
            if self._follower:
                self._follower.begin(index, prompt)
            group = await self._draw(index, prompt)
            drop = self._why_dropped(group)
            self._num_useful += drop is None
            self._tried[index] = _Attempt(prompt, group, drop)
            if self._follower:
                place = len(self._tried) - 1 if self._by_arrival else index
                self._follower.decide(place, group if drop is None else None)
            if self._is_decided():
                raise _EnoughError
            if drop is None or self._num_useful >= self._wanted:  # enough groups are done: no need to start another
                return

    def result(self) -> Selected:
        attempts, later = self._split()
        useful = _useful(attempts)
        groups = useful[: self._num_trainable(len(useful))]
        self._require_enough(groups, len(useful), attempts)
        discarded = useful[len(groups) :] + _useful(later)
        decision = {
            "keep": self._config.selection.over_sampling.keep,
            "num_prompts": len(attempts),
            "num_groups": len(groups),
            "dropped": {tried.prompt.prompt_id: tried.drop for tried in attempts if tried.drop},
            "discarded": [group.prompt.prompt_id for group in discarded],
        }
        metrics = self._metrics(groups, len(discarded), attempts)
        return Selected(groups, decision, metrics, self._outcomes(attempts))

    def _why_dropped(self, group: ScoredGroup | None) -> Drop | None:
        dynamic = self._config.selection.dynamic
        if group is None:
            return Drop.NO_SCORE
        if self._config.selection.overlong.mask_truncated and group.is_truncated.all():
            return Drop.ALL_TRUNCATED
        is_useless = dynamic.enabled and all_equal(group.numbers(dynamic.component))
        return Drop.ZERO_VARIANCE if is_useless else None

    def _is_decided(self) -> bool:
        """Returns whether no draw in progress can still change the batch."""
        if self._num_useful < self._wanted or self._by_arrival:
            return self._num_useful >= self._wanted
        unbroken = takewhile(lambda tried: tried is not None, map(self._tried.get, count()))
        return sum(tried.drop is None for tried in unbroken if tried) >= self._wanted

    def _split(self) -> tuple[list[_Attempt], list[_Attempt]]:
        order = [self._tried[index] for index in (self._tried if self._by_arrival else sorted(self._tried))]
        num_useful = accumulate(tried.drop is None for tried in order)
        end = next((at + 1 for at, number in enumerate(num_useful) if number == self._wanted), len(order))
        return order[:end], order[end:]

    def _num_trainable(self, num_groups: int) -> int:
        """Returns the most of `num_groups` that make equal mini-batches with a sample for every rank, or 0."""
        models = self._config.models
        num_groups -= num_groups % math.lcm(*(model.num_minibatches for model in models.values()))
        samples = num_groups * self._config.rollout.completions_per_prompt
        fits = all(samples // model.num_minibatches >= samples_at_once(model) for model in models.values())
        return num_groups if fits else 0

    def _require_enough(self, groups: Sequence[ScoredGroup], num_useful: int, attempts: Sequence[_Attempt]) -> None:
        if num_useful == self._wanted:
            return
        dynamic, drops = self._config.selection.dynamic, _drops(attempts)
        reasons = ", ".join(f"{number} {drop}" for drop, number in drops.items() if number)
        message = f"{num_useful} of {self._wanted} prompt groups after {len(attempts)} prompts, of which {reasons}"
        if not groups or (dynamic.enabled and dynamic.on_budget == "fail"):
            fix = f"let selection.dynamic try more prompts (max_rounds is {dynamic.max_rounds:g})"
            if dynamic.enabled and len(attempts) < int(dynamic.max_rounds * self._wanted):
                fix = "these are all prompts of data.train: add more"
            fix += ", or use prompts of another difficulty"
            if drops[Drop.ALL_TRUNCATED]:
                fix += "; samples that reach their maximum length may need more: raise rollout.sampling.max_tokens"
            if num_no_score := drops[Drop.NO_SCORE]:
                others = "" if num_no_score == len(attempts) else f"; {fix}"
                fix = f"the last without a score: {self._why_no_score()}{others}"
            raise LockstepError(f"{message}: too few to train on; {fix}", reason=Reason.TOO_FEW_GROUPS)
        log.warning("%s; training on %d", message, len(groups))

    def _metrics(
        self, groups: Sequence[ScoredGroup], num_discarded: int, attempts: Sequence[_Attempt]
    ) -> dict[str, float]:
        masked = sum(int(group.is_truncated.sum()) for group in groups)
        rewards = np.concatenate([tried.group.rewards for tried in attempts if tried.group])
        metrics = {
            "prompts": len(attempts),
            "rounds": len(attempts) / self._wanted,
            "reward_mean": rewards.mean(),  # over all scored groups; reward/mean covers only those trained on
            **{f"dropped_{drop}": number for drop, number in _drops(attempts).items()},
            "discarded": num_discarded,
            "aborted": self._num_started - len(self._tried),
            "overlong_masked": masked if self._config.selection.overlong.mask_truncated else 0,
        }
        return {f"sampling/{name}": float(value) for name, value in metrics.items()}

    def _outcomes(self, attempts: Sequence[_Attempt]) -> dict[str, tuple[int, int]]:
        curriculum = self._config.selection.curriculum
        if not curriculum.enabled:
            return {}
        scored = [tried.group for tried in attempts if tried.group]
        threshold = curriculum.pass_threshold
        passed = [reaches(group.numbers(curriculum.component), threshold) & ~group.is_failed for group in scored]
        pairs = zip(scored, passed, strict=True)
        return {group.prompt.prompt_id: (len(is_passed), int(is_passed.sum())) for group, is_passed in pairs}


def _useful(attempts: Sequence[_Attempt]) -> list[ScoredGroup]:
    return [tried.group for tried in attempts if tried.group and tried.drop is None]


def _drops(attempts: Sequence[_Attempt]) -> dict[Drop, int]:
    numbers = Counter(tried.drop for tried in attempts)
    return {drop: numbers[drop] for drop in Drop}
