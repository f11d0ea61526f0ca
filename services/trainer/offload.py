"""Offloads tensors that the current phase does not need to host memory, and restores them bit for bit."""

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch

from services.trainer.compat.torch import HostMemory, storage_id

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

    `release` and `load` are for phases and move only the groups in `leaving`; `evict` and `restore` are for a caller
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

    def release(self, *names: str) -> None:
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
        left = (self._offloaded.get(name, []) for name in names if name not in self._leaving)
        return sum(offloaded.num_bytes for offloaded in itertools.chain(*left))

    def device_bytes(self) -> int:
        return sum(storage.nbytes() for name in self._groups for storage in self._storages(name))

    def host_bytes(self) -> int:
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
