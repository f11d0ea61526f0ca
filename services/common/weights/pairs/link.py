"""Connects the two ends of a pair: an abstract Unix socket, which carries small messages and file descriptors.

Both ends are on one host and run as the same user. If one of them dies, the other sees the end of the connection.
"""

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

from services.common.compat.cuda import device_uuid
from services.common.errors import InvalidInput

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


BACKEND = "pairs"
"""Names this transport in a WeightGroup message."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a host


def device_name(device: torch.device, index: int) -> str:
    """Returns the UUID of a GPU. On CPU, returns a name of this host and of `index`, which counts ranks or workers."""
    if device.type == "cuda":
        return device_uuid(device)
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
