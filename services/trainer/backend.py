"""What a training strategy must do. The loop over mini-batches, the losses and the contract are not its business."""

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Protocol

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

    def forward(self, packs: Sequence[Pack], temperature: float, *, of_base: bool = False) -> list[torch.Tensor]:
        """The model's outputs, float32 [K, N], at each pack's targets; `of_base` without its adapters. No gradient."""

    def accumulate(
        self, packs: Sequence[Pack], temperature: float, loss: LossFunction
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Forward and backward of all packs of one optimizer update, gradients summed over packs and ranks.

        Returns each pack's outputs [K, N], without gradient, and the metrics, summed like the gradients.
        """

    def reduce(self, value: torch.Tensor, op: torch.distributed.ReduceOp.RedOpType) -> torch.Tensor:
        """Combines a tensor over the ranks that hold different samples."""

    def step(self, lr: float, weight_decay: float) -> float:
        """Clips the gradient and applies it, decaying matrices only; returns its 2-norm before the clip."""

    def discard_gradients(self) -> None:
        """Forgets what was accumulated."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Policy weights in checkpoint names and publication order; whole tensors on rank 0, anything elsewhere."""

    def sent_weights(self, bucket_bytes: int) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        """`weights`, of each round of `weight_turns` those that this rank sends; for backends that have turns."""

    def adapter(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The policy's adapters in PEFT's names, like `weights`; nothing if the whole model is trained."""

    def base(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The frozen weights that the adapters are beside, in the names and order of `weights`."""

    def adapter_specs(self) -> list[tuple[str, torch.Tensor]]:
        """Names and order of `adapter`, with meta tensors."""

    def weight_specs(self) -> list[tuple[str, torch.Tensor]]:
        """Names and order of `weights`, with meta tensors."""

    def weight_turns(self, bucket_bytes: int) -> list[tuple[int, int]]:
        """Which rank had best send how many of `weights` in buckets of this size; empty if that is rank 0 for all."""

    def save(self, directory: Path) -> Callable[[], None] | None:
        """Writes model and optimizer state into `directory`, each rank its part.

        A backend that writes while training goes on returns, once it has its copy, what writes: every rank calls that,
        outside of the order of the collectives, and it returns or raises when all ranks have written.
        """

    def load(self, directory: Path) -> None:
        """Reads what `save` wrote, on any number of ranks.

        Raises:
            InternalError: It could not be read, and the weights are half of the one and half of the other.
        """

    def close(self) -> None:
        """Forgets what is kept outside of this object."""


def compute_dtype(config: TrainerConfig, device: torch.device) -> torch.dtype:
    """Of forward and backward, and of published weights."""
    if config.compute_dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, config.compute_dtype)
