"""Replays routes in one rank's chunks of a model, in its layers and for its part of the tokens."""

import torch
import torch.distributed as dist

from services.trainer.compat.megatron.router import set_choice
from services.trainer.megatron.microbatch import MicroBatch
from services.trainer.megatron.model import Chunk
from services.trainer.routes import LayerReplay, ModelReplay


class ChunkReplay:
    """Holds the replay of each layer of a chunk."""

    def __init__(self, chunk: Chunk, tp_group: dist.ProcessGroup):
        self._config = chunk.config
        self._tp_rank, self._tp_size = dist.get_rank(tp_group), dist.get_world_size(tp_group)
        self.layers = {layer.layer_number - 1: LayerReplay() for layer in chunk.layers()}
        for layer in chunk.layers():
            set_choice(layer, self.layers[layer.layer_number - 1].choose)

    def feed(self, micro: MicroBatch) -> None:
        """Sets the routes that the chunk's next forward pass uses: those of `micro`, if it has any."""
        rows_RLK = None if micro.routes is None else self._rows(micro.routes)
        for number, layer in self.layers.items():
            layer.feed(None if rows_RLK is None else rows_RLK[:, number])

    def _rows(self, routes_BSLK: torch.Tensor) -> torch.Tensor:
        """Returns the routes of the rows that this rank's routers get: tokens before sequences, [S, B]."""
        rows_SBLK = routes_BSLK.transpose(0, 1)
        if self._config.sequence_parallel:
            rows_SBLK = rows_SBLK.chunk(self._tp_size)[self._tp_rank]
        return rows_SBLK.flatten(0, 1)


class Replay:
    """Holds the replay of all chunks of a rank."""

    def __init__(self, chunks: list[Chunk], tp_group: dist.ProcessGroup, device: torch.device):
        replays = [ChunkReplay(chunk, tp_group) for chunk in chunks]
        self._of = {id(chunk): replay for chunk, replay in zip(chunks, replays, strict=True)}
        self.model = ModelReplay([layer for replay in replays for layer in replay.layers.values()], device)
        # Without sequence parallelism all tensor-parallel ranks compute the same rows.
        is_shared = not chunks[0].config.sequence_parallel
        self._num_copies = dist.get_world_size(tp_group) if is_shared else 1

    def feed(self, chunk: Chunk, micro: MicroBatch) -> None:
        """Sets the routes that the next forward pass of `chunk` uses."""
        self._of[id(chunk)].feed(micro)

    def counts(self) -> torch.Tensor:
        """Returns what was replayed since `model.begin`, float64 [2], summed over all ranks."""
        counts_2 = self.model.counts()
        dist.all_reduce(counts_2)
        return counts_2 / self._num_copies
