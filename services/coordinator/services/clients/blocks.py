"""Sends a batch to the trainer in blocks, in one call that lasts until the batch is complete."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence

import pyarrow as pa
from lockstep.trainer.v1 import trainer_pb2 as pb

from services.common.batches import batch as batches
from services.common.batches.blocks import BlockCutter, batch_sha256, blocks_of, content_sha256, trained_tokens

# A function that makes the call with these requests.
Call = Callable[[AsyncIterator[pb.TrainBlocksRequest]], Awaitable[pb.TrainBlocksResponse]]

log = logging.getLogger(__name__)


def warn_of_skipped(batch_id: str, metrics: Mapping[str, float]) -> None:
    """Warns if updates of a batch were not applied because their gradient is not finite."""
    for name in ("skipped", "critic_skipped"):
        if num_skipped := metrics.get(name, 0):
            log.warning(
                "batch %s: skipped %g update%s whose gradient is not finite (train/%s); the weights stay as they were",
                *(batch_id, num_skipped, "" if num_skipped == 1 else "s", name),
            )


class BlockStream:
    """Makes one TrainBlocks call: `run` starts it, `send` gives it blocks, and `commit` ends it."""

    def __init__(self, header: pb.TrainHeader, call: Call):
        self._header, self._call = header, call
        # Made before they are sent: gRPC takes an error in the iterator of requests for a canceled call.
        self._parts: asyncio.Queue[Sequence[pb.TrainBlocksRequest]] = asyncio.Queue()

    async def run(self) -> tuple[int, dict[str, float]]:
        """Makes the call, which waits for blocks. Returns the new version and metrics, after the commit.

        Raises:
            LockstepError: The call failed. Nothing was applied, unless the commit was sent before.
        """
        answer = await self._call(self._requests())
        warn_of_skipped(self._header.batch_id, answer.metrics)
        return answer.version, dict(answer.metrics)

    def send(self, block: pa.Table) -> None:
        """Sends the next block."""
        frames = [pb.TrainBlocksRequest(frame=frame) for frame in batches.encode(block)]
        end = pb.TrainBlocksRequest(block=pb.TrainBlock(sha256=content_sha256(block)))
        self._parts.put_nowait([*frames, end])

    def commit(self, batch: pa.Table) -> None:
        """Sends the commit of `batch`, which must have the values of the blocks that were sent."""
        header = self._header
        cutter = BlockCutter(header.tokens_per_block, header.groups_per_minibatch, header.block_growth)
        hashes = map(content_sha256, blocks_of(batch, cutter))
        commit = pb.TrainCommit(
            sha256=batch_sha256(self._header, hashes),
            num_samples=batch.num_rows,
            num_tokens=int(trained_tokens(batch).sum()),
        )
        self._parts.put_nowait([pb.TrainBlocksRequest(commit=commit)])
        self._parts.put_nowait([])

    async def _requests(self) -> AsyncGenerator[pb.TrainBlocksRequest, None]:
        yield pb.TrainBlocksRequest(header=self._header)
        while part := await self._parts.get():
            for message in part:
                yield message
