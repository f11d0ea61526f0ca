"""Trains one rank on a batch of one block, with the commands that the trainer's servicer calls."""

import numpy as np
import pyarrow as pa

from services.common.batches import trained_tokens
from services.common.config.trainer import TrainerConfig
from services.trainer.backend import Role
from services.trainer.ranks.calls import Message
from services.trainer.ranks.worker import Worker
from services.trainer.samples import train_parts

Part = tuple[Message, dict[str, int]]
"""A rank's part of a batch, and the counts of the whole batch."""


def part_of(batch: pa.Table, config: TrainerConfig, data_ranks: int, data_rank: int) -> Part:
    """Returns a rank's part of a batch of one mini-batch."""
    rows, trained = {0: np.arange(batch.num_rows)}, trained_tokens(batch)
    counts = {"num_tokens": int(trained.sum()), "num_sequences": int((trained > 0).sum())}
    return train_parts(batch, config, data_ranks, Role.POLICY, rows)[data_rank], counts


def update(worker: Worker, part: Part, *, version: int) -> dict[str, float]:
    """Trains the policy, which is at `version`. Returns the metrics."""
    message, counts = part
    worker.begin_batch(role=Role.POLICY, temperature=1.0, is_one_block=True)
    worker.add_block(role=Role.POLICY, **message.body, frames=message.frames)
    return worker.apply_batch(role=Role.POLICY, totals=[counts], version=version).body["metrics"]
