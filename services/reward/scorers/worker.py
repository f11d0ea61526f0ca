"""Defines the base class of scorers whose work can hang or crash: they call a function in a pool of killable
processes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from services.common.config.reward import RewardConfig
from services.common.config.scorers import ITEM_FIELDS
from services.reward.processes.pool import Target, WorkerPool
from services.reward.scorers.base import Item, Scorer


class WorkerScorer(Scorer):
    """Calls `target`, a `module:function`, in a worker process with the item's fields and `kwargs`."""

    num_spares = 0
    """Number of processes that wait for another one to be killed."""
    num_tries = 2
    """How often a sample is scored whose worker dies."""

    def __init__(self, target: str, kwargs: Mapping[str, object], run: RewardConfig, *, max_concurrent: int = 1):
        self._kwargs = kwargs
        self._pool = WorkerPool(
            Target(target, max_memory_bytes=int(run.max_memory_gib * 2**30), arguments=(*ITEM_FIELDS, *kwargs)),
            num_workers=run.num_workers,
            timeout_s=run.timeout_s,
            num_spares=self.num_spares,
            max_concurrent=max_concurrent,
            num_tries=self.num_tries,
        )

    async def open(self) -> None:
        """Starts all workers concurrently, and returns when they have imported their function."""
        await self._pool.open()

    async def score(self, item: Item) -> float:
        """Returns the function's result."""
        return await self._pool.call({**asdict(item), **self._kwargs})

    async def close(self) -> None:
        """Kills the workers."""
        await self._pool.close()


def columns(items: Sequence[Item]) -> dict[str, list[object]]:
    """Returns each field of the items as a list, in the order of `items`."""
    return {name: [vars(item)[name] for item in items] for name in ITEM_FIELDS}
