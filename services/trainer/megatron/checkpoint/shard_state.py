"""Loads a distributed optimizer's state from a fully reshardable checkpoint, in batches.

Megatron's own template (sharded_param_state_fully_reshardable) holds the state of every parameter in every rank's host
memory, 12 bytes per parameter at any data-parallel size. Here a rank reads only the parameters that its shard overlaps,
which are also those that load_parameter_state_from_fully_reshardable uses, and holds one batch of them at a time.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from services.trainer.compat.megatron.optimizer import is_hybrid, share_hybrid, take_range
from services.trainer.megatron.checkpoint.optimizer_state import forget_steps
from services.trainer.megatron.checkpoint.torch_dist import Sharded, load
from services.trainer.megatron.optim.adam import chained_parts
from services.trainer.megatron.weights.stream import gather_json

# Limits the host memory of a batch. The parts of one tensor are never split, so a larger one is a batch by itself.
_BATCH_BYTES = 1 << 30
_BYTES_PER_NUMBER = 4


@dataclass(frozen=True)
class Piece:
    """Describes a parameter that this rank's shard overlaps. `wanted` has its whole sharded tensors as meta tensors."""

    part: DistributedOptimizer
    parameter: torch.nn.Parameter
    wanted: Sharded

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of `wanted` in memory after reading."""
        return len(self.wanted) * self.parameter.numel() * _BYTES_PER_NUMBER

    def take(self, whole: Sharded) -> None:
        """Sets this rank's range from the whole tensors that were read."""
        take_range(self.part, self.parameter, whole)


def shard_pieces(optimizer: MegatronOptimizer, model: Sharded) -> list[Piece]:
    """Returns what this rank has to read: nothing without the distributed optimizer.

    `model` has the sharded tensors of all parameters.
    """
    shards = {shard.data: shard for shard in model.values()}
    pieces = []
    for part in (part for _, part in chained_parts(optimizer) if isinstance(part, DistributedOptimizer)):
        for parameter in part.model_param_gbuf_map:  # the parameters in some bucket's param_map
            whole = torch.empty(parameter.shape, dtype=torch.float32, device="meta")
            wanted = {
                key: make_sharded_optimizer_tensor(shards[parameter], whole, prefix=f"optimizer.state.{key}")
                for key in ("param", "exp_avg", "exp_avg_sq")
            }
            pieces.append(Piece(part, parameter, wanted))
    return pieces


@torch.no_grad()
def load_pieces(pieces: Sequence[Piece], directory: Path) -> None:
    """Reads and sets all pieces. All ranks call it; ranks with fewer batches read nothing in the last rounds."""
    parts = {id(piece.part): piece.part for piece in pieces}
    for part in parts.values():
        forget_steps(part)
    batches = list(_batches(pieces))
    num_rounds = max(gather_json(len(batches), torch.device("cpu")))
    for batch in itertools.islice(itertools.chain(batches, itertools.repeat([])), num_rounds):
        loaded = load({index: piece.wanted for index, piece in enumerate(batch)}, directory)
        for index, piece in enumerate(batch):
            piece.take(loaded.pop(index))
    for part in parts.values():
        if is_hybrid(part):
            share_hybrid(part)


def _batches(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    # The experts of a layer are shards of one tensor, and Megatron's loader needs all of a rank's shards at once.
    groups: dict[str, list[Piece]] = {}
    for piece in pieces:
        groups.setdefault(piece.wanted["param"].key, []).append(piece)
    batch: list[Piece] = []
    for group in groups.values():
        if batch and sum(piece.num_bytes for piece in (*batch, *group)) > _BATCH_BYTES:
            yield batch
            batch = []
        batch += group
    if batch:
        yield batch
