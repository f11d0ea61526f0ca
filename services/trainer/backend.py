"""Defines the interface of a training backend (FSDP2 or Megatron).

Tensors that a phase does not need are offloaded to host memory, and restored bit for bit.
The loop over mini-batches, the losses and the on-policy contract are implemented elsewhere.
"""

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import torch

from services.common.config.trainer import CriticSettings, TrainerConfig
from services.common.weights.buckets import Item
from services.trainer.compat.torch import HostMemory, storage_id
from services.trainer.updates.packing import Microbatch

# Groups of tensors, by name. A group's tensors are listed anew whenever the group is offloaded.
PARAMS, GRADS, OPTIMIZER = "params", "grads", "optimizer"
Groups = Mapping[str, Callable[[], Iterable[torch.Tensor]]]

_ALIGN_BYTES = 512


class Part(StrEnum):
    """The parts of a model that can leave the device."""

    OPTIMIZER = "optimizer"
    """Optimizer state, float32 weights beside bfloat16 ones, and buffers for gradients, which are dropped."""
    PARAMETERS = "parameters"
    """The weights that forward and backward compute with."""


@dataclass(frozen=True)
class _Offloaded:
    """A storage without memory: its size, and where its content is in its group's host memory."""

    storage: torch.UntypedStorage
    num_bytes: int
    begin: int


class Offloader:
    """Offloads and restores groups of tensors.

    `offload` and `load` are for phases and move only the groups in `leaving`; `evict` and `restore` are for a caller
    that asks for the memory, and move any group.

    It works on storages, so that tensors which share memory (views, flat buffers) still share it afterwards. A storage
    in several groups, such as the weights of a float32 model, moves with the first of them, which must be loaded
    whenever the others are used. Gradients are dropped and come back as zeros. Host memory is kept for the next time.
    """

    def __init__(self, groups: Groups, leaving: frozenset[str], device: torch.device):
        self._groups, self._leaving, self._device = groups, leaving, device
        self._offloaded: dict[str, list[_Offloaded]] = {}
        self._host: dict[str, HostMemory] = {}
        self._evicted: set[str] = set()

    def load(self, *names: str) -> None:
        """Restores groups to the device; groups that are not offloaded stay as they are."""
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name in names:
            assert name not in self._evicted, f"{name} must be restored before it is used"
            for offloaded in self._offloaded.pop(name, ()):
                offloaded.storage.resize_(offloaded.num_bytes)
                if name == GRADS:
                    _as_bytes(offloaded.storage).zero_()
                else:
                    copies.append((_as_bytes(offloaded.storage), self._host_part(name, offloaded)))
        _copy(copies, self._device)

    def offload(self, *names: str) -> None:
        self._send(name for name in names if name in self._leaving)

    def evict(self, *names: str) -> None:
        """Offloads groups until `restore`; `load` may not be called for them. Unknown groups are ignored."""
        known = [name for name in names if name in self._groups]
        self._send(known)
        self._evicted.update(known)

    def restore(self, *names: str) -> None:
        """Restores groups that were evicted; those in `leaving` stay offloaded until a phase loads them."""
        self._evicted.difference_update(names)
        self.load(*(name for name in names if name not in self._leaving))

    def needed_bytes(self, *names: str) -> int:
        """Returns the bytes of the device that `restore` would take."""
        left = (self._offloaded.get(name, []) for name in names if name not in self._leaving)
        return sum(offloaded.num_bytes for offloaded in itertools.chain(*left))

    def device_bytes(self) -> int:
        return sum(storage.nbytes() for name in self._groups for storage in self._storages(name))

    def host_bytes(self) -> int:
        """Returns the bytes of host memory that are kept for the groups."""
        return sum(memory.flat.numel() for memory in self._host.values())

    def _send(self, names: Iterable[str]) -> None:
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        leaving = [name for name in names if name not in self._offloaded]
        for name in leaving:
            self._offloaded[name], begin = [], 0
            for storage in self._storages(name):
                self._offloaded[name].append(_Offloaded(storage, storage.nbytes(), begin))
                begin += -(-storage.nbytes() // _ALIGN_BYTES) * _ALIGN_BYTES
            if name == GRADS:
                continue
            if name not in self._host or self._host[name].flat.numel() != begin:
                self._host.pop(name, None)  # first, or both would be in memory at once
                self._host[name] = HostMemory(begin, self._device)
            copies += [
                (self._host_part(name, offloaded), _as_bytes(offloaded.storage)) for offloaded in self._offloaded[name]
            ]
        _copy(copies, self._device)
        # Only now: _copy has waited for the copies, which read this memory.
        for offloaded in itertools.chain(*(self._offloaded[name] for name in leaving)):
            offloaded.storage.resize_(0)

    def _host_part(self, name: str, offloaded: _Offloaded) -> torch.Tensor:
        return self._host[name].flat[offloaded.begin : offloaded.begin + offloaded.num_bytes]

    def _storages(self, name: str) -> list[torch.UntypedStorage]:
        """Returns each storage of a group on the device once, without those that an earlier group contains."""
        storages = {storage_id(tensor): tensor.untyped_storage() for tensor in self._groups[name]()}
        here = self._device.type
        for earlier in itertools.takewhile(lambda other: other != name, self._groups):
            for tensor in self._groups[earlier]():
                storages.pop(storage_id(tensor), None)
        return [storage for storage in storages.values() if storage.nbytes() and storage.device.type == here]


def groups_of(parts: Collection[Part]) -> list[str]:
    of_parts = {Part.PARAMETERS: (PARAMS,), Part.OPTIMIZER: (GRADS, OPTIMIZER)}
    return [name for part, names in of_parts.items() if part in parts for name in names]


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copy(copies: list[tuple[torch.Tensor, torch.Tensor]], device: torch.device) -> None:
    """Copies the second tensor of each pair to the first, and waits once for all."""
    if device.type != "cuda":
        for target, source in copies:
            target.copy_(source)
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for target, source in copies:
            target.copy_(source, non_blocking=True)
    stream.synchronize()


class Role(StrEnum):
    """A model's role in a run. The policy and the critic are trained; the reference and the teacher are frozen."""

    POLICY = "policy"
    REFERENCE = "reference"
    CRITIC = "critic"
    TEACHER = "teacher"

    @property
    def is_frozen(self) -> bool:
        return self in (Role.REFERENCE, Role.TEACHER)

    @property
    def config(self) -> type[TrainerConfig]:
        return CriticSettings if self is Role.CRITIC else TrainerConfig


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
    offloader: Offloader

    @property
    def data_rank(self) -> int:
        """Returns this rank's number among the ranks with different samples. Ranks with the same samples share it."""
        ...

    @property
    def pads_rows(self) -> bool:
        """Whether each sample of a micro-batch is computed as long as the longest; then its padding counts."""
        return False

    @contextlib.contextmanager
    def keep_generators(self) -> Iterator[None]:
        """Restores the random generators, which all roles share, after the `with` block, in which another is opened.

        Without this, opening another model would change what a policy with dropout draws next, even right after its
        checkpoint was read.
        """
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            yield

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

    def adapter(self, *, of_modules: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the policy's adapters like `weights`, with PEFT's names for the checkpoint's tensors.

        With `of_modules`, they are for transformers' modules, by which PEFT finds them. A checkpoint may name them
        otherwise.
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
        """Moves parts to host memory. No method that uses them may be called until the offloader has restored them."""
        self.offloader.evict(*groups_of(parts))


def compute_dtype(config: TrainerConfig, device: torch.device) -> torch.dtype:
    """Returns the dtype of forward and backward, and of published weights."""
    if config.compute_dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, config.compute_dtype)
