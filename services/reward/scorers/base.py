"""The interface of scorers, and those whose work can hang or crash: they call a function in a pool of processes."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeVar

from services.common.config.reward import PythonConfig, RewardConfig
from services.common.import_path import ITEM_FIELDS
from services.reward.errors import FailureReason, ScoringError
from services.reward.processes.functions import FunctionPool, function_target

log = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True)
class Item:
    """One sample with the dataset row that it answers. `extra` has the row's other columns, as JSON values."""

    prompt: str
    answer: str
    extra: Mapping[str, object]
    completion: str
    num_tokens: int
    finish_reason: str
    messages: Sequence[object] = ()
    """The messages of which a chat template made `prompt`; empty if it is no template's."""
    tokens: Sequence[int] = ()
    """Those of `completion`, special ones too; empty if no scorer reads them."""
    answer_column: str = ""
    """The dataset's column that has the answers, or a field of one; empty if it is not known."""
    answer_is_integer: bool = False
    """Whether the row has the answer as an integer, of which `answer` is the text."""

    def fields(self) -> dict[str, object]:
        """Returns what functions and services of users get."""
        return {name: vars(self)[name] for name in ITEM_FIELDS}

    def with_answer_column(self) -> Self:
        """Returns the item with the answer in `extra` too, under its column's name, as the row has it: an integer is
        one. What `extra` has under that name stays."""
        name = self.answer_column
        if not name or "." in name or not self.answer or (name == "answer" and not self.answer_is_integer):
            return self
        answer = int(self.answer) if self.answer_is_integer else self.answer
        return replace(self, extra={name: answer, **self.extra})

    def column(self, key: str | None, setting: str) -> object:
        """Returns the row's extra column `key`, which the scorer's `setting` names; the answer if it names none."""
        if key is None:
            return self.answer
        if key not in self.extra:
            detail = f"no column {key!r}: change the scorer's {setting} or data.extra_columns"
            raise ScoringError(FailureReason.INVALID_ANSWER, detail)
        return self.extra[key]


class Scorer:
    """Scores samples, many concurrently. `version` must change whenever the same item could get a different score.

    A scorer implements either `score`, for one sample, or `score_group`, for all samples of a prompt group together.
    """

    version: str
    reads_tokens = False

    async def open(self) -> None:
        """Starts what the scorer needs. Raises ScoringError if it cannot start."""

    async def score(self, item: Item) -> float:
        """Returns the raw score of `item`, a finite number. Raises ScoringError if it has none."""
        raise NotImplementedError

    async def score_group(self, items: Sequence[Item]) -> list[float | ScoringError]:
        """Returns a finite raw score or an error per item, in order. Raises ScoringError if no item has a score."""
        return await gather_scores(self.score(item) for item in items)

    async def close(self) -> None:
        """Ends what `open` has started. No score is in progress any more."""


async def gather_scores(scores: Iterable[Awaitable[Result]]) -> list[Result | ScoringError]:
    """Awaits all at the same time. Returns their results and ScoringErrors; raises the first other error."""
    checked: list[Result | ScoringError] = []
    for result in await asyncio.gather(*scores, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, ScoringError):
            raise result
        checked.append(result)
    return checked


def share_s(group_timeout_s: float, *, num_samples: int, num_slots: int) -> float:
    """Returns how long each of `num_samples` may take, `num_slots` at once, so that a group ends in its time limit."""
    return group_timeout_s / math.ceil(num_samples / num_slots)


class WorkerScorer(Scorer):
    """Calls `target`, a `module:function`, in a worker process with the item's fields and `kwargs`."""

    num_spares = 0  # processes that wait for another one to be killed
    num_tries = 2  # of a sample whose worker dies

    def __init__(self, target: str, kwargs: Mapping[str, object], reward: RewardConfig, *, max_concurrent: int = 1):
        self._kwargs, arguments = kwargs, (*ITEM_FIELDS, *kwargs)
        self._pool = FunctionPool(
            function_target(target, max_memory_bytes=int(reward.max_memory_gib * 2**30), arguments=arguments),
            num_workers=reward.num_workers,
            timeout_s=reward.timeout_s,
            num_spares=self.num_spares,
            max_concurrent=max_concurrent,
            num_tries=self.num_tries,
        )

    async def open(self) -> None:
        await self._pool.open()

    async def score(self, item: Item) -> float:
        return await self._pool.call({**item.fields(), **self._kwargs})

    async def close(self) -> None:
        await self._pool.close()


def columns(items: Sequence[Item]) -> dict[str, list[object]]:
    """Returns each field of the items as a list, in the order of `items`."""
    return {name: [vars(item)[name] for item in items] for name in ITEM_FIELDS}


class PythonScorer(WorkerScorer):
    """Scores with the function's results. Its path comes from the run's config, never from a sample."""

    def __init__(self, config: PythonConfig, reward: RewardConfig):
        super().__init__(config.path, config.kwargs, reward, max_concurrent=config.max_concurrent)
        self._config, self._convention = config, ""

    async def open(self) -> None:
        await super().open()
        self.version = self._pool.version  # the hash of the source file that the workers loaded
        self._convention, self.reads_tokens = self._pool.facts["convention"], self._pool.facts["reads_tokens"]
        log.info(
            "scorer %s: %s is called with the arguments of %s",
            self._config.component,
            self._config.path,
            self._convention,
        )
        if self._convention == "verl" and self._config.group:
            detail = f"{self._config.path} is a function of verl, which takes one sample: leave out group"
            raise ScoringError(FailureReason.ERROR, detail)

    async def score_group(self, items: Sequence[Item]) -> list[float | ScoringError]:
        items = [item.with_answer_column() for item in items]
        if self._convention == "TRL":
            fields = {**columns(items), "prompt": [item.messages or item.prompt for item in items]}
            if self.reads_tokens:
                fields["completion_ids"] = [item.tokens for item in items]
                if any(item.num_tokens and not item.tokens for item in items):
                    detail = (
                        f"{self._config.path} takes completion_ids, which what an agent leaves behind does not have"
                    )
                    raise ScoringError(FailureReason.ERROR, detail)
        elif self._config.group:
            fields = columns(items)
        else:
            return await super().score_group(items)
        return await self._pool.call_group({**fields, **self._kwargs}, len(items))
