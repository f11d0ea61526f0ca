"""Receives a batch in blocks, and has the ranks compute each block's gradient as soon as it is there."""

import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from lockstep.trainer.v1 import trainer_pb2 as pb

from services.common.batches import batch as batches
from services.common.batches.blocks import (
    BlockCutter,
    batch_sha256,
    begins_of_groups,
    blocks_of,
    content_sha256,
    tokens_of_groups,
    trained_tokens,
)
from services.common.config.trainer import TrainerConfig
from services.common.errors import Aborted, DataLoss, InvalidInput, Reason
from services.trainer.losses import Totals
from services.trainer.ranks.calls import Ranks
from services.trainer.ranks.shards import block_parts, groups_per_minibatch
from services.trainer.ranks.worker import Worker


class BlockReader:
    """Reads the messages of a TrainBlocks call: `header`, then the blocks by iteration, which ends after the commit."""

    def __init__(self, messages: AsyncIterator[pb.TrainBlocksRequest]):
        self._messages = messages
        self._header = pb.TrainHeader()
        self._hashes: list[bytes] = []
        self._num_samples = self._num_tokens = 0

    async def header(self) -> pb.TrainHeader:
        """Returns the header.

        Raises:
            InvalidInput: The first message is not a header for blocks of the policy.
        """
        async for message in self._messages:
            self._header = message.header  # an empty one if the message is something else
            break
        if self._header.role != pb.ROLE_POLICY or not self._header.tokens_per_block:
            raise InvalidInput(
                "header: must be the first message, for the policy and with tokens_per_block above 0", field="header"
            )
        return self._header

    async def __aiter__(self) -> AsyncIterator[pa.Table]:
        """Yields each block once it is complete. After the last one, compares the whole with the commit.

        Raises:
            InvalidInput: A message is not one that may come there, or the frames are not a table of SAMPLE_SCHEMA.
            DataLoss: CORRUPT_TRANSFER, a block or the batch is not what was sent, or the stream ended before its
                commit.
        """
        frames: list[bytes] = []
        async for message in self._messages:
            part = message.WhichOneof("part")
            if part == "frame":
                frames.append(message.frame)
            elif part == "block":
                block, frames = batches.decode(frames, schema=batches.SAMPLE_SCHEMA), []
                if content_sha256(block) != message.block.sha256:
                    raise _corrupt("the bytes of a block changed on the way")
                yield block
                self._note(block, message.block.sha256)  # the caller has checked its samples
            elif part == "commit" and not frames:
                self._require_batch(message.commit)
                return
            else:
                raise InvalidInput(f"{part}: not expected here", field=part or "part")
        raise _corrupt("it ended before its commit")

    async def rest(self) -> pa.Table:
        """Returns the samples of all blocks. Raises as iteration does; DataLoss if there is no block."""
        blocks = [block async for block in self]
        if not blocks:
            raise _corrupt("it has no block")
        return pa.concat_tables(blocks)

    def _note(self, block: pa.Table, sha256: bytes) -> None:
        self._hashes.append(sha256)
        self._num_samples += block.num_rows
        self._num_tokens += int(trained_tokens(block).sum())

    def _require_batch(self, commit: pb.TrainCommit) -> None:
        if (self._num_samples, self._num_tokens) != (commit.num_samples, commit.num_tokens):
            raise _corrupt(
                f"the commit is for {commit.num_samples} samples and {commit.num_tokens} trained tokens, and "
                f"{self._num_samples} and {self._num_tokens} have arrived"
            )
        if batch_sha256(self._header, self._hashes) != commit.sha256:
            raise _corrupt("its header or its values are not those of the commit")


class BlockTraining:
    """Trains on one batch in blocks. Their gradients are added up on the ranks, and applied only by `apply`."""

    def __init__(self, ranks: Ranks, header: pb.TrainHeader, config: TrainerConfig, data_ranks: Sequence[int]):
        self.header = header
        self.busy_s = 0.0
        """Seconds in which the ranks have worked on this batch."""
        self._ranks, self._config, self._data_ranks = ranks, config, data_ranks
        self._blocks: list[pa.Table] = []
        self._trained: list[list[np.ndarray]] = [[] for _ in range(config.num_minibatches)]
        """The number of trained tokens of each sample, by mini-batch and block."""
        self._groups: set[int] = set()
        self._groups_per_minibatch = header.groups_per_minibatch
        self._cutter = self._new_cutter()
        self._is_applied = False

    async def begin(self) -> None:
        """Begins the batch; drops the gradients of a batch that was begun before.

        Raises:
            InvalidInput: The config does not allow blocks, or the header does not say where mini-batches end.
        """
        num_minibatches = self._config.num_minibatches
        if not self._config.adds_blocks:
            raise InvalidInput(
                "tokens_per_block: must be 0, because this config trains on whole batches (docs/concepts.md, A step)",
                field="tokens_per_block",
            )
        if num_minibatches > 1 and not self._groups_per_minibatch:
            raise InvalidInput(
                f"groups_per_minibatch: must be above 0 with trainer.num_minibatches {num_minibatches}",
                field="groups_per_minibatch",
            )
        await self._ranks.call(Worker.begin_blocks, temperature=self.header.temperature)

    async def add(self, block: pa.Table) -> None:
        """Hands the ranks a block, whose samples were checked. Those of the first mini-batch compute its gradient.

        Raises:
            InvalidInput: The block does not continue the one before it, does not end where the header says, or cannot
                be trained on with the config.
        """
        minibatch = self._minibatch_of(block)
        begin = time.perf_counter()
        parts = block_parts(block, self._config, max(self._data_ranks) + 1)
        await self._ranks.call(Worker.add_block, [parts[rank] for rank in self._data_ranks], minibatch=minibatch)
        self._blocks.append(block)
        self._trained[minibatch].append(trained_tokens(block))
        self.busy_s += time.perf_counter() - begin

    async def apply(self, version: int) -> dict[str, Any]:
        """Updates the policy, which is at `version`, on the mini-batches of all blocks. Returns the metrics.

        Raises:
            InvalidInput: A mini-batch has no trained tokens, or fewer groups than the header says.
        """
        begin = time.perf_counter()
        wanted, num_groups = self._groups_per_minibatch * self._config.num_minibatches, len(self._groups)
        if wanted and num_groups != wanted:
            raise InvalidInput(
                f"group: the mini-batches need {wanted} groups, and {num_groups} have arrived", field="group"
            )
        totals = [vars(_totals(blocks)) for blocks in self._trained]
        if not all(minibatch["num_tokens"] for minibatch in totals):
            raise InvalidInput("loss_mask: masks every token of a mini-batch", field="loss_mask")
        answers = await self._ranks.call(Worker.apply_blocks, totals=totals, version=version)
        self._is_applied = True
        self.busy_s += time.perf_counter() - begin
        return answers[0].body["metrics"]

    async def whole(self, samples: pa.Table, version: int) -> dict[str, Any]:
        """Trains on a batch that has arrived as a whole; the result is the same as that of its blocks.

        Raises:
            LockstepError: As `add` and `apply`. Nothing was applied.
        """
        self._groups_per_minibatch = groups_per_minibatch(samples, self._config.num_minibatches)
        self._cutter = self._new_cutter()
        await self.begin()
        try:
            for block in blocks_of(samples, self._new_cutter()):
                await self.add(block)
            return await self.apply(version)
        except BaseException:
            await self.drop()
            raise

    async def drop(self) -> None:
        """Discards the gradients, if they were not applied."""
        if not self._is_applied:
            await self._ranks.call(Worker.drop_blocks)

    @property
    def samples(self) -> pa.Table:
        """Returns the samples of all blocks so far."""
        return pa.concat_tables(self._blocks) if self._blocks else batches.SAMPLE_SCHEMA.empty_table()

    def _new_cutter(self) -> BlockCutter:
        return BlockCutter(self.header.tokens_per_block, self._groups_per_minibatch, self.header.block_growth)

    def _minibatch_of(self, block: pa.Table) -> int:
        """Returns the number of the mini-batch that the next block is in.

        Raises:
            InvalidInput: It does not continue the block before it, does not end where the header says, or is in a
                mini-batch that the config does not have.
        """
        groups = block["group"].to_numpy()[begins_of_groups(block)].tolist()
        follows_short, least_tokens = self._cutter.is_inside, self._cutter.least_tokens
        ends = [self._cutter.ends_with(num_tokens) for num_tokens in tokens_of_groups(block)]
        if follows_short or any(ends[:-1]) or len(self._groups.union(groups)) < len(self._groups) + len(groups):
            raise InvalidInput(
                f"group: a block of groups {groups} cannot follow {sorted(self._groups)}; the samples of a group must "
                f"be neighbors, and each block but the last must end with the group with which it has at least "
                f"{least_tokens} tokens, or with its mini-batch",
                field="group",
            )
        minibatch = len(self._groups) // (self._groups_per_minibatch or sys.maxsize)
        if minibatch >= self._config.num_minibatches:
            raise InvalidInput(
                f"group: {groups} are not in one of the {self._config.num_minibatches} mini-batches of "
                f"{self._groups_per_minibatch} groups",
                field="group",
            )
        self._groups.update(groups)
        return minibatch


class OpenStream:
    """Holds the batch whose blocks are arriving, if any. A call that begins another or needs the ranks ends it."""

    def __init__(self) -> None:
        self._training: BlockTraining | None = None

    async def begin(self, training: BlockTraining) -> None:
        """Begins `training`, after the end of the one before."""
        await self.end()
        await training.begin()
        self._training = training

    def require(self, training: BlockTraining) -> None:
        """Raises Aborted if another call has ended `training`."""
        if self._training is not training:
            raise Aborted(
                f"another call has ended the stream of batch {training.header.batch_id}: send the batch as a whole",
                reason=Reason.STREAM_ENDED,
            )

    async def end(self, training: BlockTraining | None = None) -> None:
        """Discards the gradients of the batch in progress, if there is one; if given, only if it is `training`."""
        if self._training is not None and training in (None, self._training):
            ended, self._training = self._training, None
            await ended.drop()


def _totals(blocks: Sequence[np.ndarray]) -> Totals:
    trained = np.concatenate([np.zeros(0, np.int64), *blocks])
    return Totals(int(trained.sum()), int((trained > 0).sum()))


def _corrupt(why: str) -> DataLoss:
    return DataLoss(f"a batch in blocks did not arrive as sent: {why}", reason=Reason.CORRUPT_TRANSFER)
