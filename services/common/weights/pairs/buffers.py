"""Makes the buffers of a pair: memory that the trainer rank packs buckets into and the engine worker loads them from.

On a GPU a buffer is plain memory of cudaMalloc that the other process maps by its CUDA IPC handle. Events order the
work of the two processes on the device. On CPU it is anonymous shared memory (memfd), whose file descriptor is passed
along. It has no name, so no other process can open it, and it is gone with the last process that maps it.
"""

import fcntl
import mmap
import os
from collections.abc import Sequence

import torch
from lockstep.types.v1 import pairs_pb2 as pb

from services.common.compat import cuda
from services.common.errors import InvalidInput

NUM_BUFFERS = 2
# Both buffers together are kept between publications if they take at most this share of the GPU's memory. Allocating,
# mapping, unmapping and freeing them would take several ms of each publication. By default, a fifth of a shared GPU is
# not the engine's (SHARED_UTILIZATION in services/common/config/placement.py).
_KEPT_SHARE = 0.04
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


# `tensors` are the buffers, each uint8 [buffer_bytes]; `fds` are file descriptors that go along with `message`.
class _OwnedCpuBuffers:
    def __init__(self, buffer_bytes: int):
        self.fds = [_shared_memory(buffer_bytes) for _ in range(NUM_BUFFERS)]
        self.tensors = [_as_tensor(fd, buffer_bytes) for fd in self.fds]
        self.message = pb.PairBuffers(buffer_bytes=buffer_bytes, is_kept=True)

    def mapped(self, answer: pb.PairMapped) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []

    def wait_until_read(self, buffer: int) -> None: ...

    def written(self, buffer: int) -> None: ...

    def free(self) -> None:
        self.mapped(pb.PairMapped())
        self.tensors = []


class _MappedCpuBuffers:
    def __init__(self, message: pb.PairBuffers, fds: Sequence[int]):
        for fd in fds:
            _require_sealed(fd, message.buffer_bytes)
        self.tensors = [_as_tensor(fd, message.buffer_bytes) for fd in fds]
        self.answer, self.is_kept = pb.PairMapped(), message.is_kept

    def wait_until_written(self, buffer: int) -> None: ...

    def read(self, buffer: int) -> None: ...

    def unmap(self) -> None:
        self.tensors = []


class _OwnedCudaBuffers:
    """The buffers on the trainer rank's end."""

    def __init__(self, buffer_bytes: int, device: torch.device):
        torch.cuda.set_device(device)
        self.fds: Sequence[int] = ()
        self._addresses: list[int] = []
        try:
            for _ in range(NUM_BUFFERS):
                self._addresses.append(cuda.allocate(buffer_bytes))
        except RuntimeError:
            self.free()
            raise
        self.tensors = [cuda.tensor_at(address, buffer_bytes, device) for address in self._addresses]
        self._written, handles = _events()
        self._read: list[cuda.SharedEvent] = []
        self._device = device
        self.message = pb.PairBuffers(
            buffer_bytes=buffer_bytes,
            memory_handles=[cuda.memory_handle(address) for address in self._addresses],
            written_handles=handles,
            is_kept=NUM_BUFFERS * buffer_bytes <= _KEPT_SHARE * torch.cuda.mem_get_info(device)[1],
        )

    def mapped(self, answer: pb.PairMapped) -> None:
        """Takes the other end's answer to `message`."""
        _require_handles(answer.read_handles)
        self._read = [cuda.SharedEvent.of(handle, self._device) for handle in answer.read_handles]

    def wait_until_read(self, buffer: int) -> None:
        """Makes the device wait until the other end has read the buffer."""
        self._read[buffer].wait()

    def written(self, buffer: int) -> None:
        """Marks the buffer as written, as soon as the device has finished the work that was queued before."""
        self._written[buffer].record()

    def free(self) -> None:
        """Frees the memory, which the other end must have unmapped."""
        self.tensors = []
        while self._addresses:
            cuda.free(self._addresses.pop())


class _MappedCudaBuffers:
    """The buffers on the engine worker's end."""

    def __init__(self, message: pb.PairBuffers, device: torch.device):
        torch.cuda.set_device(device)
        self._addresses: list[int] = []
        try:
            for handle in message.memory_handles:
                self._addresses.append(cuda.map_memory(handle))
        except RuntimeError:
            self.unmap()
            raise
        self.tensors = [cuda.tensor_at(address, message.buffer_bytes, device) for address in self._addresses]
        self._written = [cuda.SharedEvent.of(handle, device) for handle in message.written_handles]
        self._read, handles = _events()
        self.answer, self.is_kept = pb.PairMapped(read_handles=handles), message.is_kept

    def wait_until_written(self, buffer: int) -> None:
        """Makes the device wait until the buffer holds the bucket."""
        self._written[buffer].wait()

    def read(self, buffer: int) -> None:
        """Marks the buffer as read, as soon as the device has finished the work that was queued before."""
        self._read[buffer].record()

    def unmap(self) -> None:
        self.tensors = []
        while self._addresses:
            cuda.unmap_memory(self._addresses.pop())


OwnedBuffers = _OwnedCpuBuffers | _OwnedCudaBuffers
MappedBuffers = _MappedCpuBuffers | _MappedCudaBuffers


def make_buffers(buffer_bytes: int, device: torch.device) -> OwnedBuffers:
    return _OwnedCudaBuffers(buffer_bytes, device) if device.type == "cuda" else _OwnedCpuBuffers(buffer_bytes)


def map_buffers(
    message: pb.PairBuffers, fds: Sequence[int], device: torch.device, *, least_bytes: int
) -> MappedBuffers:
    """Maps the buffers of the other end. Takes over the file descriptors."""
    try:
        if message.buffer_bytes < least_bytes:
            raise InvalidInput(f"buffers of {message.buffer_bytes} bytes are too small for buckets of {least_bytes}")
        if device.type == "cuda":
            _require_handles(message.memory_handles)
            _require_handles(message.written_handles)
            return _MappedCudaBuffers(message, device)
        if len(fds) != NUM_BUFFERS:
            raise InvalidInput(f"{len(fds)} file descriptors came for {NUM_BUFFERS} buffers")
        return _MappedCpuBuffers(message, fds)
    finally:
        for fd in fds:
            os.close(fd)


def _events() -> tuple[list[cuda.SharedEvent], list[bytes]]:
    events = [cuda.SharedEvent.new() for _ in range(NUM_BUFFERS)]
    return events, [event.handle for event in events]


def _require_handles(handles: Sequence[bytes]) -> None:
    sizes = [len(handle) for handle in handles]
    if sizes != [cuda.HANDLE_BYTES] * NUM_BUFFERS:
        raise InvalidInput(f"not {NUM_BUFFERS} handles of {cuda.HANDLE_BYTES} bytes: {sizes}")


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
        raise InvalidInput(f"a buffer is not shared memory of {num_bytes} bytes whose size is sealed")


def _as_tensor(fd: int, num_bytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)  # the tensor keeps the mapping
