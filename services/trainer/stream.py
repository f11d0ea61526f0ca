"""Receives a batch as a stream of blocks, and has the ranks train on it."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator

import numpy as np
import pyarrow as pa
from lockstep.trainer.v1 import trainer_pb2 as pb

from services.common import batches
from services.common.errors import Aborted, DataLoss, InvalidInput, Reason
from services.trainer.backend import Role
from services.trainer.contract import OpenRole, check_contract, check_temperature
from services.trainer.ranks.calls import Ranks
from services.trainer.ranks.worker import Worker
from services.trainer.samples import minibatch_rows, train_parts


class BatchReader:
    """Reads the messages of a Train call: `header`, then the blocks by iteration, which ends after the commit."""

    def __init__(self, messages: AsyncIterator[pb.TrainRequest]):
        self._messages = messages
        self._header = pb.TrainHeader()
        self._hashes: list[bytes] = []
        self._num_samples = self._num_tokens = 0

    async def header(self) -> pb.TrainHeader:
        message = await anext(self._messages, pb.TrainRequest())
        if not message.HasField("header"):
            raise InvalidInput("header: must be the first message", field="header")
        self._header = message.header
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
                # In a thread: hashing a block here would keep other calls waiting.
                if await asyncio.to_thread(batches.content_sha256, block) != message.block.sha256:
                    raise _corrupt("the bytes of a block changed on the way")
                yield block
                self._hashes.append(message.block.sha256)
                self._num_samples += block.num_rows
                self._num_tokens += int(batches.trained_tokens(block).sum())  # the caller has checked its samples
            elif part == "commit" and not frames:
                self._require_batch(message.commit)
                return
            else:
                raise InvalidInput(f"{part}: not expected here", field=part or "part")
        raise _corrupt("it ended before its commit")

    async def rest(self) -> pa.Table:
        return pa.concat_tables([block async for block in self])

    def _require_batch(self, commit: pb.TrainCommit) -> None:
        if not self._hashes:
            raise _corrupt("it has no block")
        if (self._num_samples, self._num_tokens) != (commit.num_samples, commit.num_tokens):
            raise _corrupt(
                f"the commit is for {commit.num_samples} samples and {commit.num_tokens} trained tokens, and "
                f"{self._num_samples} and {self._num_tokens} have arrived"
            )
        if batches.batch_sha256(self._header, self._hashes) != commit.sha256:
            raise _corrupt("its header or its values are not those of the commit")


class BatchTraining:
    """Trains a role on one batch, whose blocks the ranks get as they arrive. Only `apply` changes the weights."""

    def __init__(self, ranks: Ranks, header: pb.TrainHeader, opened: OpenRole):
        """Checks what the header says of the whole batch.

        Raises:
            InvalidInput: The role or its config does not allow blocks, or it is unknown where mini-batches end.
        """
        if not header.batch_id:
            raise InvalidInput("batch_id: required", field="batch_id")
        check_temperature(header.temperature)
        self.role, self.header, self.opened = opened.role, header, opened
        self.busy_s = 0.0
        """Seconds in which the ranks have worked on this batch."""
        self._ranks, self._config = ranks, opened.config
        self._num_minibatches = opened.config.num_minibatches
        self._blocks: list[pa.Table] = []
        self._totals = [{"num_tokens": 0, "num_sequences": 0} for _ in range(self._num_minibatches)]
        """What was trained on so far of each mini-batch, the arguments of losses.Totals."""
        self._groups: set[int] = set()
        self._cutter = batches.BlockCutter(header.tokens_per_block, header.groups_per_minibatch, header.block_growth)
        self._is_applied = False
        if not header.tokens_per_block:
            return
        if self.role is Role.CRITIC or not self._config.adds_blocks:
            raise InvalidInput(
                f"tokens_per_block: must be 0, because the {self.role} with this config trains on whole batches "
                "(docs/concepts.md, A step)",
                field="tokens_per_block",
            )
        if self._num_minibatches > 1 and not header.groups_per_minibatch:
            raise InvalidInput(
                f"groups_per_minibatch: must be above 0 with trainer.num_minibatches {self._num_minibatches}",
                field="groups_per_minibatch",
            )

    async def begin(self) -> None:
        """Begins the batch on the ranks; drops the gradients of one that was begun before."""
        temperature, is_one_block = self.header.temperature, not self.header.tokens_per_block
        await self._ranks.call(Worker.begin_batch, role=self.role, temperature=temperature, is_one_block=is_one_block)

    async def add(self, block: pa.Table) -> None:
        """Hands the ranks a block.

        Raises:
            InvalidInput: Its samples are invalid; it does not continue the block before it, does not end where the
                header says, or cannot be trained on with the config.
            PreconditionFailed: A stamp or a version is not that of the weights.
        """
        check_contract(self.header, block, self.opened)
        rows = self._rows_by_minibatch(block)
        begin = time.perf_counter()
        pads_rows = self.opened.pads_rows
        parts = train_parts(block, self._config, self.opened.num_parts, self.role, rows, pads_rows=pads_rows)
        own_parts = [parts[data_rank] for data_rank in self.opened.data_ranks]
        await self._ranks.call(Worker.add_block, own_parts, role=self.role)
        self._blocks.append(block)
        trained, of_samples = batches.trained_tokens(block), np.zeros(block.num_rows, np.int64)
        begins = batches.begins_of_samples(block)  # a sample counts at its first row
        of_samples[begins] = np.add.reduceat(trained, begins)
        for number, of_minibatch in rows.items():
            self._totals[number]["num_tokens"] += int(trained[of_minibatch].sum())
            self._totals[number]["num_sequences"] += int((of_samples[of_minibatch] > 0).sum())
        self.busy_s += time.perf_counter() - begin

    async def apply(self) -> dict[str, float]:
        """Makes the updates of all mini-batches. Returns the metrics.

        Raises:
            InvalidInput: A mini-batch has no trained tokens, or fewer groups than the header says.
        """
        begin = time.perf_counter()
        num_needed, num_groups = self.header.groups_per_minibatch * self._num_minibatches, len(self._groups)
        if self.header.tokens_per_block and num_needed and num_groups != num_needed:
            raise InvalidInput(
                f"group: the mini-batches need {num_needed} groups, and {num_groups} have arrived", field="group"
            )
        if not all(minibatch["num_tokens"] for minibatch in self._totals):
            raise InvalidInput("loss_mask: masks every token of a mini-batch", field="loss_mask")
        version = self.opened.state.version
        answers = await self._ranks.call(Worker.apply_batch, role=self.role, totals=self._totals, version=version)
        self._is_applied = True
        self.busy_s += time.perf_counter() - begin
        return answers[0].body["metrics"]

    async def drop(self) -> None:
        if not self._is_applied:
            await self._ranks.call(Worker.drop_batch, role=self.role)

    @property
    def samples(self) -> pa.Table:
        return pa.concat_tables(self._blocks)

    def _rows_by_minibatch(self, block: pa.Table) -> dict[int, np.ndarray]:
        """Returns the rows of the next block that belong to each mini-batch, by its number."""
        if self.header.tokens_per_block:
            return {self._minibatch_of(block): np.arange(block.num_rows)}
        if self._blocks:
            raise InvalidInput("tokens_per_block: 0 allows only one block", field="tokens_per_block")
        return dict(enumerate(minibatch_rows(block, self._num_minibatches)))

    def _minibatch_of(self, block: pa.Table) -> int:
        """Returns the number of the mini-batch that the next block is in.

        Raises:
            InvalidInput: It does not continue the block before it, does not end where the header says, or is in a
                mini-batch that the config does not have.
        """
        groups = block["group"].to_numpy()[batches.begins_of_groups(block)].tolist()
        follows_short, least_tokens = self._cutter.continues, self._cutter.least_tokens
        ends = [self._cutter.ends_with(num_tokens) for num_tokens in batches.tokens_of_groups(block)]
        if follows_short or any(ends[:-1]) or len(self._groups.union(groups)) < len(self._groups) + len(groups):
            raise InvalidInput(
                f"group: a block of groups {groups} cannot follow {sorted(self._groups)}; the samples of a group must "
                f"be neighbors, and each block but the last must end with the group with which it has at least "
                f"{least_tokens} tokens, or with its mini-batch",
                field="group",
            )
        minibatch = len(self._groups) // (self.header.groups_per_minibatch or sys.maxsize)
        if minibatch >= self._num_minibatches:
            raise InvalidInput(
                f"group: {groups} are not in one of the {self._num_minibatches} mini-batches of "
                f"{self.header.groups_per_minibatch} groups",
                field="group",
            )
        self._groups.update(groups)
        return minibatch


class ArrivingBatches:
    """The batch of each role whose blocks are arriving. A call that begins another or needs the ranks ends it."""

    def __init__(self) -> None:
        self._trainings: dict[Role, BatchTraining] = {}

    async def begin(self, training: BatchTraining) -> None:
        await self.end(self._trainings.get(training.role))
        await training.begin()
        self._trainings[training.role] = training

    def require(self, training: BatchTraining) -> None:
        if self._trainings.get(training.role) is not training:
            raise Aborted(
                f"another call has ended the stream of batch {training.header.batch_id}: send the batch again",
                reason=Reason.STREAM_ENDED,
            )

    async def end(self, training: BatchTraining | None) -> None:
        """Discards the gradients of `training`, unless another call has ended it."""
        if training is not None and self._trainings.get(training.role) is training:
            del self._trainings[training.role]
            await training.drop()

    async def end_all(self) -> None:
        for training in list(self._trainings.values()):
            await self.end(training)


def _corrupt(why: str) -> DataLoss:
    return DataLoss(f"a batch did not arrive as sent: {why}", reason=Reason.CORRUPT_TRANSFER)
