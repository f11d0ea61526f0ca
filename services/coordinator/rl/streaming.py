"""Sends the blocks of a step's batch to the trainer while other groups are still being generated.

The trainer keeps the gradients of the blocks and applies nothing before the commit, which is sent once the batch is on
disk. A stream that is lost costs only time: the batch is then sent as a whole, which gives the same weights.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager

import pyarrow as pa
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.batches.blocks import begins_of_groups
from services.common.config.streaming import streams
from services.common.errors import LockstepError, Reason
from services.common.tasks import task_group
from services.coordinator.clients.trainer import BlockStream
from services.coordinator.data.groups import ScoredGroup, to_table
from services.coordinator.rl.step import LoopContext, kl_coef, with_advantages
from services.coordinator.runs.run import Run

log = logging.getLogger(__name__)

# Errors that are not the batch's fault: the connection, the deadline, or another call that needed the trainer.
_LOST = {Reason.UNREACHABLE, Reason.DEADLINE, Reason.STREAM_ENDED}
Updated = tuple[int, dict[str, float]]


class Blocks:
    """Sends the blocks of one batch. Unless the stream is lost on the way, its failure fails the step at once."""

    def __init__(
        self,
        begin: Callable[[], BlockStream] | None,
        to_block: Callable[[Sequence[ScoredGroup]], pa.Table],
        num_wanted: int | None,
        tasks: asyncio.TaskGroup,
    ):
        """Creates the stream. With fewer groups than `num_wanted`, mini-batches would end elsewhere."""
        self._begin, self._to_block, self._num_wanted, self._tasks = begin, to_block, num_wanted, tasks
        self._sent: tuple[BlockStream, asyncio.Task[Updated | None]] | None = None
        self._groups: list[int] = []

    def take(self, groups: Sequence[ScoredGroup]) -> None:
        """Sends the next block, if the config streams; called as soon as it is complete."""
        if self._begin is None:
            return
        if self._sent is None:
            stream = self._begin()
            self._sent = stream, self._tasks.create_task(_unless_lost(stream))
        self._sent[0].send(self._to_block(groups))
        self._groups += [group.index for group in groups]

    async def commit(self, batch: pa.Table) -> Updated | None:
        """Applies the blocks of `batch`, which is on disk. Returns the new version and metrics.

        Returns None if no block was sent, the stream was lost, or `batch` has another order or fewer groups for its
        mini-batches than what was sent: it must be sent as a whole.
        """
        if self._sent is None:
            return None
        groups = batch["group"].to_numpy()[begins_of_groups(batch)].tolist()
        # A group that was sampled again, because its replica was lost, is shorter than the part that was reported.
        if groups != self._groups or self._num_wanted not in (None, len(groups)):
            log.warning("the batch has another order or smaller mini-batches than its blocks; it is sent as a whole")
            self.end()
            return None
        stream, answer = self._sent
        stream.commit(batch)
        return await answer

    def end(self) -> None:
        """Ends the stream; without a commit, nothing is applied."""
        if self._sent is not None:
            self._sent[1].cancel()


@asynccontextmanager
async def sending_blocks(run: Run, context: LoopContext, stamp: PolicyStamp) -> AsyncGenerator[Blocks, None]:
    """Yields the blocks of the batch sampled from `stamp`. Without `commit`, the `with` block applies nothing.

    Raises:
        LockstepError: As the trainer.
    """
    config, coef = run.config, kl_coef(run, stamp.version)

    def to_block(groups: Sequence[ScoredGroup]) -> pa.Table:
        return with_advantages(config, to_table(groups, mask_truncated=config.selection.overlong.mask_truncated), coef)

    num_wanted = config.data.prompts_per_step if config.trainer.num_minibatches > 1 else None
    begin = (lambda: context.trainer.stream(run.batch_id(stamp), stamp)) if streams(config) else None
    async with task_group() as tasks:
        blocks = Blocks(begin, to_block, num_wanted, tasks)
        try:
            yield blocks
        finally:
            blocks.end()


async def _unless_lost(stream: BlockStream) -> Updated | None:
    """Returns the answer of `stream`, or None if it was lost on the way."""
    try:
        return await stream.run()
    except LockstepError as error:
        if error.reason not in _LOST:
            raise
        log.warning("the stream of blocks was lost; the batch is sent as a whole: %s", error.message)
        return None
