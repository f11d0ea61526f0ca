"""Defines the interface of a training backend (FSDP2 or Megatron).

The loop over mini-batches, the losses and the on-policy contract are implemented elsewhere.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import torch

from services.common.config.trainer import TrainerConfig
from services.common.weights.buckets import Item
from services.trainer.offload import Offloader, Part, groups_of
from services.trainer.updates.packing import Microbatch


class Role(StrEnum):
    """A model's role in a run. The policy and the critic are trained; the reference and the teacher are frozen."""

    POLICY = "policy"
    REFERENCE = "reference"
    CRITIC = "critic"
    TEACHER = "teacher"

    @property
    def is_frozen(self) -> bool:
        return self in (Role.REFERENCE, Role.TEACHER)


# (outputs_KN, microbatch) -> (loss, metrics), both to be summed over all micro-batches of all ranks. A language model's
# outputs are log-probability and entropy, K = 2, followed by those of other tokens (updates/logprobs.py), if the
# micro-batch names some; a critic's output is the value, K = 1.
LossFunction = Callable[[torch.Tensor, Microbatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]


class Backend(Protocol):
    """One rank's part of one model.

    All methods are collectives, which every rank calls in the same order, except those that move parts of the model to
    host memory and back. Methods with a body here are for backends that can do no better.
    """

    device: torch.device
    _offloader: Offloader

    @property
    def data_rank(self) -> int:
        """Returns this rank's number among the ranks with different samples. Ranks with the same samples share it."""
        ...

    @property
    def pads_rows(self) -> bool:
        """Whether each sample of a micro-batch is computed as long as the longest; then its padding counts."""
        return False

    def forward(self, microbatches: Sequence[Microbatch], temperature: float) -> list[torch.Tensor]:
        """Returns the model's outputs at each micro-batch's targets, float32 [K, N], without gradient.

        All micro-batches have the same `top_k`, and none has tokens of a teacher.
        """
        ...

    def accumulate(
        self, microbatches: Sequence[Microbatch], temperature: float, loss: LossFunction, *, is_whole: bool
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Runs forward and backward on all micro-batches of one block of an update; sums gradients over micro-batches
        and ranks.

        With `is_whole`, the block is the whole update, and its gradient can be applied. Without it, the gradient is
        added to those of the blocks since `step` or `discard_gradients`, and `complete_blocks` must be called before
        `step`; `forward` may be called between blocks.

        Returns the first two outputs of each micro-batch [K, N], without gradient, and the metrics, also summed over
        micro-batches and ranks.
        """
        ...

    def complete_blocks(self, factor: float) -> None:
        """Completes the sum of the blocks' gradients over ranks, and multiplies it by `factor`."""
        ...

    def reduce(self, value: torch.Tensor, op: torch.distributed.ReduceOp.RedOpType) -> torch.Tensor:
        """Combines a tensor over the ranks that hold different samples."""
        ...

    def replayed(self) -> torch.Tensor:
        """Returns counts of the last `accumulate` of micro-batches with routed experts, float64 [2], summed over all
        ranks.

        The first is the number of pairs of a token and a layer whose experts were replayed, the second the number of
        these experts that the router would have chosen too.
        """
        ...

    def step(self, lr: float, weight_decay: float) -> float:
        """Clips the gradient and applies it; decays matrices only. Returns the gradient's 2-norm before clipping.

        Discards the gradient. If the norm is not finite, nothing is applied: weights and optimizer stay as they are.
        """
        ...

    def discard_gradients(self) -> None: ...

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the policy's weights with their checkpoint names, in publication order.

        Rank 0 gets whole tensors. On other ranks the tensors are unspecified, but must still be consumed.
        """
        ...

    def weight_specs(self) -> list[tuple[str, torch.Tensor]]:
        """Returns the names of `weights`, in the same order, with meta tensors."""
        ...

    def spans(self) -> Iterator[Item]:
        """Yields what `weights` yields; weights that are neighbors in memory, such as experts, may come together."""
        return self.weights()

    def sender_slots(self, bucket_bytes: int) -> list[tuple[int, int]]:
        """Returns the slots of a publication in order: for each, the rank and the number of `weights` that it sends.

        Slots are planned for buckets of `bucket_bytes`. The list is empty if rank 0 should send everything.
        """
        return []

    def sent_weights(self, bucket_bytes: int) -> Iterator[Iterator[Item]]:
        """Yields for each round of `sender_slots` an iterator over the `weights` that this rank sends in it."""
        return iter(())

    def forward_base(self, microbatches: Sequence[Microbatch], temperature: float) -> list[torch.Tensor]:
        """Returns the outputs of `forward` as they would be without the adapters."""
        ...

    def base(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the base weights, which adapters leave frozen, with the names and in the order of `weights`."""
        ...

    def adapter(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the policy's adapters like `weights`, with PEFT's names for the checkpoint's tensors."""
        ...

    def adapter_of_modules(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields what `adapter` does, with PEFT's names for transformers' modules, by which PEFT finds them.

        A checkpoint may name them otherwise.
        """
        ...

    def adapter_specs(self) -> list[tuple[str, torch.Tensor]]:
        """Returns the names of `adapter`, in the same order, with meta tensors."""
        ...

    def save(self, directory: Path) -> None:
        """Writes this rank's part of the model and optimizer state into `directory`."""
        ...

    saves_in_background: bool = False
    """Whether the config asks for checkpoints that are written while training goes on."""

    def begin_save(self, directory: Path) -> Callable[[], None]:
        """Copies the model and optimizer state. Returns a function that writes the copy into `directory`.

        Every rank must call this function; unlike the backend's collectives, it may run at the same time as others. It
        returns or raises when all ranks have written.
        """
        raise AssertionError("this backend saves only in the foreground")

    def load(self, directory: Path) -> None:
        """Reads what `save` wrote, also if the number of ranks was different.

        Raises:
            InternalError: Reading failed half-way, so that the model has some old and some new weights.
        """
        ...

    def close(self) -> None:
        """Releases state that is kept outside of this object."""
        ...

    def release(self, parts: Collection[Part]) -> None:
        """Moves parts to host memory. No method that uses them may be called until they are acquired."""
        self._offloader.evict(*groups_of(parts))

    def acquire(self, parts: Collection[Part]) -> None:
        """Moves parts back to the device, bit for bit. Parts that are there stay as they are."""
        self._offloader.restore(*groups_of(parts))

    def needed_bytes(self, parts: Collection[Part]) -> int:
        """Returns the bytes of the device that `acquire` would take."""
        return self._offloader.needed_bytes(*groups_of(parts))

    def device_bytes(self) -> int:
        """Returns the bytes of the device that both parts take now."""
        return self._offloader.device_bytes()

    def host_bytes(self) -> int:
        """Returns the bytes of host memory that are kept for the parts."""
        return self._offloader.host_bytes()


def compute_dtype(config: TrainerConfig, device: torch.device) -> torch.dtype:
    """Returns the dtype of forward and backward, and of published weights."""
    if config.compute_dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, config.compute_dtype)
