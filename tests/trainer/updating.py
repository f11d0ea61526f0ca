"""Trains one rank's worker on a batch, with the commands that the servicer calls."""

from typing import Any

import numpy as np
import pyarrow as pa

from services.common.batches import trained_tokens
from services.common.config.trainer import TrainerConfig
from services.trainer.backend import Role
from services.trainer.ranks.calls import Message
from services.trainer.ranks.worker import Worker
from services.trainer.samples import minibatch_rows, train_parts


def whole_parts(
    batch: pa.Table, config: TrainerConfig, num_parts: int, role: Role = Role.POLICY, *, pads_rows: bool = False
) -> list[Message]:
    """Returns each rank's part of a batch that is one block."""
    rows = dict(enumerate(minibatch_rows(batch, config.num_minibatches)))
    return train_parts(batch, config, num_parts, role, rows, pads_rows=pads_rows)


def totals_of(batch: pa.Table, config: TrainerConfig) -> list[dict[str, int]]:
    """Returns the counts of each mini-batch of a batch that is one block."""
    trained = trained_tokens(batch)
    return [counts_of(trained[rows]) for rows in minibatch_rows(batch, config.num_minibatches)]


def counts_of(trained: np.ndarray) -> dict[str, int]:
    """Returns the counts of samples that have these numbers of trained tokens."""
    return {"num_tokens": int(trained.sum()), "num_sequences": int((trained > 0).sum())}


def train_whole(
    worker: Worker, part: Message, totals: list[dict[str, int]], *, version: int = 0, **begin: Any
) -> dict[str, float]:
    """Trains on a batch that is one block, of which this rank has `part`; returns the metrics."""
    role = begin.setdefault("role", Role.POLICY)
    worker.begin_batch(**{"temperature": 1.0, "is_one_block": True, **begin})
    worker.add_block(role=role, **part.body, frames=part.frames)
    return worker.apply_batch(role=role, totals=totals, version=version).body["metrics"]
