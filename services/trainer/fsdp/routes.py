"""Replays routes in the layers of a Hugging Face model."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from services.common.batches.routes import RouteShape
from services.common.errors import InternalError
from services.trainer.compat.transformers import routers, set_choice
from services.trainer.routes import LayerReplay, ModelReplay
from services.trainer.updates.packing import Pack


class Replay:
    """Makes the layers of experts compute with the routes of packs that have them."""

    def __init__(self, causal_lm: PreTrainedModel, shape: RouteShape, device: torch.device):
        found = routers(causal_lm)
        if len(found) != shape.num_layers:
            raise InternalError(f"{len(found)} routers are known in a model of {shape.num_layers} layers of experts")
        self._layers = [LayerReplay() for _ in found]
        self._model = ModelReplay(self._layers, device)
        for router, layer in zip(found, self._layers, strict=True):
            set_choice(router, layer.choose)

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Surrounds the passes over the packs of an update."""
        self._model.begin()
        yield
        self._model.end()

    def feed(self, pack: Pack) -> None:
        """Sets the routes that the next forward pass uses: those of `pack`, if it has any."""
        for number, layer in enumerate(self._layers):
            layer.feed(None if pack.routes_TLK is None else pack.routes_TLK[:, number])

    def counts(self) -> torch.Tensor:
        """Returns what was replayed in the last `passes`, float64 [2], summed over all ranks."""
        counts_2 = self._model.counts()
        dist.all_reduce(counts_2)
        return counts_2
