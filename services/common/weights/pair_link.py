"""Connects the two ends of a pair: an abstract Unix socket, which carries small messages and file descriptors, and the
buffers that the trainer rank packs buckets into and the engine worker loads them from.

Both ends are on one host and run as the same user. If one of them dies, the other sees the end of the connection.

On a GPU a buffer is plain memory of cudaMalloc that the other process maps by its CUDA IPC handle. Events order the
work of the two processes on the device. On CPU it is anonymous shared memory (memfd), whose file descriptor is passed
along. It has no name, so no other process can open it, and it is gone with the last process that maps it.
"""

import fcntl
import mmap
import os
import secrets
import select
import socket
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from google.protobuf.message import DecodeError
from lockstep.types.v1 import pairs_pb2 as pb

from services.common.compat import cuda
from services.common.errors import InvalidInput

NUM_BUFFERS = 2
# Both buffers together are kept between publications if they take at most this share of the GPU's memory. Allocating,
# mapping, unmapping and freeing them would take several ms of each publication. By default, a fifth of a shared GPU is
# not the engine's (SHARED_UTILIZATION in services/common/config/operation.py).
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


_MAX_BYTES, _MAX_FDS = 4 << 10, 4
_CREDENTIALS = struct.Struct("3i")  # process, user and group, as in SO_PEERCRED


class Link:
    """One end of a connection. All methods raise OSError if the other end is gone."""

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._socket.setblocking(False)

    @classmethod
    def to(cls, name: str) -> "Link":
        """Connects to the listener `name`."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(_address(name))
            _require_same_user(connection)
        except BaseException:
            connection.close()
            raise
        return cls(connection)

    def send(self, message: pb.PairMessage, fds: Sequence[int] = ()) -> None:
        """Sends a message. It never waits, because the kernel buffers more messages than a pair ever has in flight."""
        socket.send_fds(self._socket, [message.SerializeToString()], list(fds))

    def has_message(self, timeout_s: float = 0) -> bool:
        """Returns whether `receive` returns or raises without waiting. Waits for that until the timeout."""
        return _is_readable(self._socket, timeout_s)

    def receive(self) -> tuple[pb.PairMessage, list[int]]:
        """Returns the next message and the file descriptors that came with it, which the caller closes."""
        flags = socket.MSG_CMSG_CLOEXEC
        data, fds, _, _ = socket.recv_fds(self._socket, _MAX_BYTES, _MAX_FDS, flags)
        if not data:
            raise ConnectionResetError("the other end has left")
        try:
            return pb.PairMessage.FromString(data), list(fds)
        except DecodeError as error:
            for fd in fds:
                os.close(fd)
            raise ConnectionAbortedError("the other end sent something else than a message") from error

    def close(self) -> None:
        self._socket.close()


class Listener:
    """Listens for the other end of a pair. `name` is for that end only, but does not need to be secret."""

    def __init__(self) -> None:
        self.name = f"lockstep-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(_address(self.name))
        self._socket.listen()
        self._socket.setblocking(False)

    def has_connection(self) -> bool:
        return _is_readable(self._socket, 0)

    def accept(self) -> Link | None:
        """Returns the next connection; None if the other end runs as another user."""
        connection, _ = self._socket.accept()
        try:
            _require_same_user(connection)
        except PermissionError:
            connection.close()
            return None
        return Link(connection)

    def close(self) -> None:
        self._socket.close()


def _is_readable(own: socket.socket, timeout_s: float) -> bool:
    poller = select.poll()  # select() takes no descriptor above 1023, and a rank may have more
    poller.register(own, select.POLLIN)
    return bool(poller.poll(timeout_s * 1e3))


def _address(name: str) -> bytes:
    return b"\0" + name.encode()


def _require_same_user(connection: socket.socket) -> None:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.getuid():
        raise PermissionError(f"the other end runs as user {user}, not {os.getuid()}")


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a host


def device_name(device: torch.device, index: int) -> str:
    """Returns the UUID of a GPU. On CPU, returns a name of this host and of `index`, which counts ranks or workers."""
    if device.type == "cuda":
        return cuda.device_uuid(device)
    return f"{_BOOT_ID.read_text().strip()}/{index}"


def partners(members: Sequence[pb.PairMember], num_trainer_ranks: int) -> Mapping[int, int]:
    """Returns the trainer rank of every engine worker, both as ranks in the weight group."""
    ranks, workers = members[:num_trainer_ranks], members[num_trainer_ranks:]
    for what, these in (("trainer ranks", ranks), ("engine workers", workers)):
        most = Counter(member.device for member in these).most_common(1)
        if most and most[0][1] > 1:
            raise InvalidInput(
                f"placement colocated: {most[0][1]} {what} are on device {most[0][0]}, only one may be",
                field="placement",
            )
    rank_on = {member.device: rank for rank, member in enumerate(ranks)}
    for index, worker in enumerate(workers):
        if worker.device not in rank_on:
            raise InvalidInput(
                f"placement colocated: engine worker {index} is on device {worker.device}, but the trainer ranks are "
                f"on {', '.join(rank_on)}: start both with the same CUDA_VISIBLE_DEVICES on one host",
                field="placement",
            )
    return {num_trainer_ranks + index: rank_on[worker.device] for index, worker in enumerate(workers)}
