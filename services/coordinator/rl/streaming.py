"""A step whose blocks of groups are trained on while other groups are still generated.

The trainer keeps the gradients of the blocks and applies nothing before the commit, which is sent once the batch is on
disk. A stream that is lost costs only time: the batch is then sent as a whole, which gives the same weights.
"""

import asyncio
import functools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Protocol

import pyarrow as pa
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.config.streaming import streams
from services.common.errors import LockstepError, Reason
from services.common.tasks import task_group
from services.coordinator.data.groups import ScoredGroup
from services.coordinator.rl.step import LoopContext, kl_coef, to_samples, update
from services.coordinator.runs.run import Run
from services.coordinator.services.clients.blocks import BlockStream

log = logging.getLogger(__name__)

# What says nothing against the batch: the connection, the deadline, or another call that needed the trainer.
_LOST = {Reason.UNREACHABLE, Reason.DEADLINE, Reason.STREAM_ENDED}
Updated = tuple[int, dict[str, float]]


class Update(Protocol):
    """How the models of a step are updated."""

    def take(self, groups: Sequence[ScoredGroup]) -> None:
        """Gets the next block of groups as soon as it is complete."""
        ...

    async def apply(self, batch: pa.Table) -> Updated:
        """Updates the models on the batch, which is on disk. Returns the new version and metrics."""
        ...


def update_of(run: Run, context: LoopContext, stamp: PolicyStamp) -> AbstractAsyncContextManager[Update]:
    """Returns the update of one step from `stamp`. Leaving it without `apply` applies nothing."""
    whole = _Whole(functools.partial(update, run, context, stamp=stamp))
    return _streamed(run, context, stamp, whole) if streams(run.config) else nullcontext(whole)


class _Whole:
    """Sends the batch when it is complete."""

    def __init__(self, train: Callable[[pa.Table], Awaitable[Updated]]):
        self._train = train

    def take(self, groups: Sequence[ScoredGroup]) -> None:
        pass

    async def apply(self, batch: pa.Table) -> Updated:
        return await self._train(batch)


class _Streamed:
    """Sends each block when it is complete. A stream that fails for a reason of its own fails the step at once."""

    def __init__(
        self,
        begin: Callable[[], BlockStream],
        to_block: Callable[[Sequence[ScoredGroup]], pa.Table],
        whole: _Whole,
        tasks: asyncio.TaskGroup,
    ):
        self._begin, self._to_block, self._whole, self._tasks = begin, to_block, whole, tasks
        self._stream: BlockStream | None = None
        self._answer: asyncio.Task[Updated | None] | None = None

    def take(self, groups: Sequence[ScoredGroup]) -> None:
        if self._stream is None:
            self._stream = self._begin()
            self._answer = self._tasks.create_task(_unless_lost(self._stream))
        self._stream.send(self._to_block(groups))

    async def apply(self, batch: pa.Table) -> Updated:
        if self._stream is not None and self._answer is not None:
            self._stream.commit(batch)
            if (updated := await self._answer) is not None:
                return updated
        return await self._whole.apply(batch)

    def end(self) -> None:
        if self._answer is not None:
            self._answer.cancel()


@asynccontextmanager
async def _streamed(run: Run, context: LoopContext, stamp: PolicyStamp, whole: _Whole) -> AsyncGenerator[Update, None]:
    coef = kl_coef(run, stamp.version)
    async with task_group() as tasks:
        streamed = _Streamed(
            lambda: context.trainer.stream(run.batch_id(stamp), stamp),
            lambda groups: to_samples(run.config, groups, coef),
            whole,
            tasks,
        )
        try:
            yield streamed
        finally:
            streamed.end()


async def _unless_lost(stream: BlockStream) -> Updated | None:
    """Returns the answer of `stream`, or None if it was lost on the way."""
    try:
        return await stream.run()
    except LockstepError as error:
        if error.reason not in _LOST:
            raise
        log.warning("the stream of blocks was lost; the batch is sent as a whole: %s", error.message)
        return None
