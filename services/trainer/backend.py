"""What a training strategy must do, and what only some can do, each as a protocol of its own.

The loop over mini-batches, the losses and the contract are not its business.
"""

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from services.common.config.trainer.section import TrainerConfig
from services.trainer.updates.packing import Pack


class Role(StrEnum):
    """What a model is for. Policy and critic are trained; the reference is frozen."""

    POLICY = "policy"
    REFERENCE = "reference"
    CRITIC = "critic"


# (outputs_KN, pack) -> loss to be summed over all packs of all ranks, metrics to be summed likewise. The outputs of a
# language model are log-probability and entropy, K = 2, and of a critic the value, K = 1.
LossFunction = Callable[[torch.Tensor, Pack], tuple[torch.Tensor, dict[str, torch.Tensor]]]


class Backend(Protocol):
    """One rank's part of one model. All methods are collectives: every rank calls them in the same order."""

    device: torch.device

    @property
    def data_rank(self) -> int:
        """Which of the ranks with different samples this is; ranks that share their samples have the same."""
        ...

    def forward(self, packs: Sequence[Pack], temperature: float) -> list[torch.Tensor]:
        """Returns the model's outputs, float32 [K, N], at each pack's targets, without gradient."""
        ...

    def accumulate(
        self, packs: Sequence[Pack], temperature: float, loss: LossFunction
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Forward and backward of all packs of one optimizer update, gradients summed over packs and ranks.

        Returns each pack's outputs [K, N], without gradient, and the metrics, summed like the gradients.
        """
        ...

    def reduce(self, value: torch.Tensor, op: torch.distributed.ReduceOp.RedOpType) -> torch.Tensor:
        """Combines a tensor over the ranks that hold different samples."""
        ...

    def step(self, lr: float, weight_decay: float) -> float:
        """Clips the gradient and applies it, decaying matrices only; returns its 2-norm before the clip."""
        ...

    def discard_gradients(self) -> None:
        """Forgets what was accumulated."""
        ...

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Policy weights in checkpoint names and publication order; whole tensors on rank 0, anything elsewhere."""
        ...

    def weight_specs(self) -> list[tuple[str, torch.Tensor]]:
        """Names and order of `weights`, with meta tensors."""
        ...

    def save(self, directory: Path) -> None:
        """Writes model and optimizer state into `directory`, each rank its part."""
        ...

    def load(self, directory: Path) -> None:
        """Reads what `save` wrote, on any number of ranks.

        Raises:
            InternalError: It could not be read, and the weights are half of the one and half of the other.
        """
        ...

    def close(self) -> None:
        """Forgets what is kept outside of this object."""
        ...


@runtime_checkable
class SeveralSenders(Protocol):
    """A backend whose ranks can share the sending of a publication, since they hold different weights."""

    def sender_slots(self, bucket_bytes: int) -> list[tuple[int, int]]:
        """Returns the slots of a publication in order, each a rank and how many of `weights` it sends.

        Slots fit buckets of `bucket_bytes`. The list is empty if rank 0 had best send all.
        """
        ...

    def sent_weights(self, bucket_bytes: int) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        """Yields `weights` in rounds of `sender_slots`, of each round those that this rank sends."""
        ...


@runtime_checkable
class Adapters(Protocol):
    """A backend that can train adapters beside a frozen base. These methods are for a config with adapters."""

    def forward_base(self, packs: Sequence[Pack], temperature: float) -> list[torch.Tensor]:
        """Returns what `forward` would without the adapters."""
        ...

    def base(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the frozen weights that the adapters are beside, in the names and order of `weights`."""
        ...

    def adapter(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the policy's adapters in PEFT's names, like `weights`."""
        ...

    def adapter_specs(self) -> list[tuple[str, torch.Tensor]]:
        """Returns names and order of `adapter`, with meta tensors."""
        ...


@runtime_checkable
class BackgroundSaves(Protocol):
    """A backend that can write a checkpoint while training goes on."""

    @property
    def saves_in_background(self) -> bool:
        """Whether the config asks for it."""
        ...

    def begin_save(self, directory: Path) -> Callable[[], None]:
        """Copies model and optimizer state and returns what writes the copy into `directory`.

        Every rank calls that, outside of the order of the collectives, and it returns or raises when all ranks have
        written.
        """
        ...


def compute_dtype(config: TrainerConfig, device: torch.device) -> torch.dtype:
    """Of forward and backward, and of published weights."""
    if config.compute_dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, config.compute_dtype)
