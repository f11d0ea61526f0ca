"""The slots of a pair: memory that the trainer rank packs buckets into and the engine worker loads them from.

On a GPU a slot is plain memory of cudaMalloc that the other process maps by its CUDA IPC handle; events order the work
of the two processes on the device. On CPU it is anonymous shared memory (memfd), whose file descriptor is passed along.
It has no name, so no other process can open it, and it is gone with the last process that maps it.
"""

import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import Protocol

import torch
from lockstep.types.v1 import pairs_pb2 as pb

from services.common.compat import cuda
from services.common.errors import InvalidInput

NUM_SLOTS = 2
_EVENT_HANDLE_BYTES = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class OwnedSlots(Protocol):
    """The trainer rank's end."""

    tensors: Sequence[torch.Tensor]
    message: pb.PairSlots
    fds: Sequence[int]

    def mapped(self, answer: pb.PairMapped) -> None:
        """Takes the other end's answer to `message`."""
        ...

    def wait_until_read(self, slot: int) -> None:
        """Makes the device wait until the other end has read the slot."""
        ...

    def written(self, slot: int) -> None:
        """Notes that the slot holds a bucket, as soon as the device has done what was asked of it so far."""
        ...

    def free(self) -> None:
        """Frees the memory, which the other end must have unmapped."""
        ...


class MappedSlots(Protocol):
    """The engine worker's end."""

    tensors: Sequence[torch.Tensor]
    answer: pb.PairMapped

    def wait_until_written(self, slot: int) -> None:
        """Makes the device wait until the slot holds the bucket."""
        ...

    def read(self, slot: int) -> None:
        """Notes that the slot was read, as soon as the device has done what was asked of it so far."""
        ...

    def unmap(self) -> None:
        """Ends the mapping. The tensors must not be used any more."""
        ...


def make_slots(slot_bytes: int, device: torch.device) -> OwnedSlots:
    """Allocates the slots of a pair."""
    return _OwnedCudaSlots(slot_bytes, device) if device.type == "cuda" else _OwnedCpuSlots(slot_bytes)


def map_slots(message: pb.PairSlots, fds: Sequence[int], device: torch.device, *, least_bytes: int) -> MappedSlots:
    """Maps the slots of the other end. Takes over the file descriptors.

    Raises:
        InvalidInput: The message does not describe slots for buckets of `least_bytes` on this device.
    """
    try:
        if message.slot_bytes < least_bytes:
            raise InvalidInput(f"slots of {message.slot_bytes} bytes are too small for buckets of {least_bytes}")
        if device.type == "cuda":
            _require_handles(message.memory_handles, cuda.HANDLE_BYTES)
            _require_handles(message.written_handles, _EVENT_HANDLE_BYTES)
            return _MappedCudaSlots(message, device)
        if len(fds) != NUM_SLOTS:
            raise InvalidInput(f"{len(fds)} file descriptors came for {NUM_SLOTS} slots")
        return _MappedCpuSlots(message, fds)
    finally:
        for fd in fds:
            os.close(fd)


class _OwnedCpuSlots:
    def __init__(self, slot_bytes: int):
        self.fds = [_shared_memory(slot_bytes) for _ in range(NUM_SLOTS)]
        self.tensors = [_as_tensor(fd, slot_bytes) for fd in self.fds]
        self.message = pb.PairSlots(slot_bytes=slot_bytes)

    def mapped(self, answer: pb.PairMapped) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []

    def wait_until_read(self, slot: int) -> None: ...

    def written(self, slot: int) -> None: ...

    def free(self) -> None:
        self.mapped(pb.PairMapped())
        self.tensors = []


class _MappedCpuSlots:
    def __init__(self, message: pb.PairSlots, fds: Sequence[int]):
        for fd in fds:
            _require_sealed(fd, message.slot_bytes)
        self.tensors = [_as_tensor(fd, message.slot_bytes) for fd in fds]
        self.answer = pb.PairMapped()

    def wait_until_written(self, slot: int) -> None: ...

    def read(self, slot: int) -> None: ...

    def unmap(self) -> None:
        self.tensors = []


class _OwnedCudaSlots:
    fds = ()

    def __init__(self, slot_bytes: int, device: torch.device):
        torch.cuda.set_device(device)
        self._addresses: list[int] = []
        try:
            for _ in range(NUM_SLOTS):
                self._addresses.append(cuda.allocate(slot_bytes))
        except RuntimeError:
            self.free()
            raise
        self.tensors = [cuda.tensor_at(address, slot_bytes, device) for address in self._addresses]
        self._written, handles = _events()
        self._read: list[torch.cuda.Event] = []
        self._device = device
        self.message = pb.PairSlots(
            slot_bytes=slot_bytes,
            memory_handles=[cuda.memory_handle(address) for address in self._addresses],
            written_handles=handles,
        )

    def mapped(self, answer: pb.PairMapped) -> None:
        _require_handles(answer.read_handles, _EVENT_HANDLE_BYTES)
        self._read = [torch.cuda.Event.from_ipc_handle(self._device, handle) for handle in answer.read_handles]

    def wait_until_read(self, slot: int) -> None:
        self._read[slot].wait()

    def written(self, slot: int) -> None:
        self._written[slot].record()

    def free(self) -> None:
        self.tensors = []
        while self._addresses:
            cuda.free(self._addresses.pop())


class _MappedCudaSlots:
    def __init__(self, message: pb.PairSlots, device: torch.device):
        torch.cuda.set_device(device)
        self._addresses: list[int] = []
        try:
            for handle in message.memory_handles:
                self._addresses.append(cuda.map_memory(handle))
        except RuntimeError:
            self.unmap()
            raise
        self.tensors = [cuda.tensor_at(address, message.slot_bytes, device) for address in self._addresses]
        self._written = [torch.cuda.Event.from_ipc_handle(device, handle) for handle in message.written_handles]
        self._read, handles = _events()
        self.answer = pb.PairMapped(read_handles=handles)

    def wait_until_written(self, slot: int) -> None:
        self._written[slot].wait()

    def read(self, slot: int) -> None:
        self._read[slot].record()

    def unmap(self) -> None:
        self.tensors = []
        while self._addresses:
            cuda.unmap_memory(self._addresses.pop())


def _events() -> tuple[list[torch.cuda.Event], list[bytes]]:
    """Returns an event for each slot and its handle. A handle exists only once the event was recorded."""
    events = [torch.cuda.Event(interprocess=True) for _ in range(NUM_SLOTS)]
    for event in events:
        event.record()
    return events, [bytes(event.ipc_handle()) for event in events]


def _require_handles(handles: Sequence[bytes], num_bytes: int) -> None:
    if [len(handle) for handle in handles] != [num_bytes] * NUM_SLOTS:
        raise InvalidInput(f"not {NUM_SLOTS} handles of {num_bytes} bytes: {[len(handle) for handle in handles]}")


def _shared_memory(num_bytes: int) -> int:
    fd = os.memfd_create("lockstep-pair", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)  # a file that shrinks would end the other process by SIGBUS
    return fd


def _require_sealed(fd: int, num_bytes: int) -> None:
    try:
        is_sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:
        is_sealed = False
    if not is_sealed or os.fstat(fd).st_size != num_bytes:
        raise InvalidInput(f"a slot is not shared memory of {num_bytes} bytes whose size is sealed")


def _as_tensor(fd: int, num_bytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)  # the tensor keeps the mapping
