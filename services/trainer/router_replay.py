"""Replays routed experts: makes the layers of experts of a model choose what the engine chose, and counts that they
did.

Suffixes: R rows that a layer computes (tokens, some of them padding), K experts for each row, L layers, E experts.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist

from services.common.errors import InternalError
from services.trainer.compat.torch import is_in_backward

# Stands for the routed experts of padding, which the router chooses itself.
NO_EXPERT = -1


class LayerReplay:
    """Gives the router of one layer the experts of the micro-batch that it computes.

    A layer that is recomputed in the backward pass gets those of its forward pass: with pipelining, other micro-batches
    come in between, but the backward passes of a layer have the order of its forward passes.
    """

    def __init__(self) -> None:
        self._next_RK: torch.Tensor | None = None
        self._computed: deque[torch.Tensor | None] = deque()
        self._num_computed = 0
        self.counts_2: torch.Tensor | None = None
        """Rows that were replayed in forward passes, and the experts among them that the router would have chosen too;
        without padding, float64."""

    def feed(self, experts_RK: torch.Tensor | None) -> None:
        """Sets the experts of the forward pass that follows; None lets the router choose."""
        self._next_RK = experts_RK

    def choose(self, own_RK: torch.Tensor) -> torch.Tensor:
        """Returns the experts to compute with, int64, instead of the router's `own_RK`."""
        is_again = is_in_backward()
        experts_RK = self._computed.popleft() if is_again else self._next_RK
        if not is_again:
            self._computed.append(experts_RK)
            self._num_computed += 1
        if experts_RK is None:
            return own_RK
        if experts_RK.shape != own_RK.shape:
            raise InternalError(
                f"a router computes {list(own_RK.shape)}, and its routed experts are {list(experts_RK.shape)}"
            )
        chosen_RK = experts_RK.long()
        is_padding_R1 = chosen_RK[:, :1] == NO_EXPERT
        if not is_again:
            self._count(chosen_RK, own_RK, is_padding_R1)
        return torch.where(is_padding_R1, own_RK, chosen_RK)

    def begin(self) -> None:
        """Forgets the micro-batches that were computed, and the counts."""
        self._computed.clear()
        self._num_computed, self.counts_2 = 0, None

    def end(self) -> None:
        """Checks that all micro-batches were recomputed since `begin`, or none, and forgets them.

        Raises:
            InternalError: Some were, so that routed experts may have been those of another micro-batch.
        """
        if len(self._computed) not in (0, self._num_computed):
            done = self._num_computed - len(self._computed)
            raise InternalError(f"a layer of experts was recomputed for {done} of {self._num_computed} micro-batches")
        self._next_RK = None  # or what the micro-batches have would stay on the device until the next update
        self._computed.clear()

    def _count(self, chosen_RK: torch.Tensor, own_RK: torch.Tensor, is_padding_R1: torch.Tensor) -> None:
        agrees_RK = (own_RK[:, :, None] == chosen_RK[:, None, :]).any(-1) & ~is_padding_R1
        counts_2 = torch.stack([(~is_padding_R1).sum(), agrees_RK.sum()]).double()
        self.counts_2 = counts_2 if self.counts_2 is None else self.counts_2 + counts_2


class ModelReplay:
    """The replay of the layers of experts of a rank's part of a model, by their numbers in the whole model."""

    def __init__(self, layers: Mapping[int, LayerReplay], device: torch.device, copies: int = 1):
        """`copies` is the number of ranks that replay the same rows."""
        self._layers, self._device, self._copies = layers, device, copies

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Surrounds passes over micro-batches that may have a backward pass.

        Raises:
            InternalError: Only some micro-batches were recomputed.
        """
        for layer in self._layers.values():
            layer.begin()
        yield
        for layer in self._layers.values():
            layer.end()

    def feed(self, experts_RLK: torch.Tensor | None) -> None:
        """Sets the experts of the forward pass that follows, of all layers of the model; None lets routers choose."""
        for number, layer in self._layers.items():
            layer.feed(None if experts_RLK is None else experts_RLK[:, number])

    def counts(self) -> torch.Tensor:
        """Returns the sums of the layers' counts in the last `passes`, float64 [2], summed over all ranks."""
        counts = [layer.counts_2 for layer in self._layers.values() if layer.counts_2 is not None]
        counts_2 = torch.stack([torch.zeros(2, dtype=torch.float64, device=self._device), *counts]).sum(0)
        dist.all_reduce(counts_2)
        return counts_2 / self._copies
