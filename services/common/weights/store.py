"""The store through which the members of a weight group meet, behind a gate that wants a secret.

torch's TCPStore asks nobody who they are: whoever can connect can list all keys, read, change and delete them, and it
listens on every interface. Here it listens on loopback, and the gate before it lets in the connections of a host that
has proved that it knows the secret. The secret is made with the store and travels in calls only, so over mTLS.
"""

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
import threading
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from services.common.errors import InvalidInput

log = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_SECRET_BYTES = 32
# No connection of a TCPStore begins with this byte, which is the kind of its first query.
_KNOCK, _WELCOME = b"\xfe", b"\xff"
# Whoever connects says this soon what it wants.
_SILENCE_S = 10.0
_CHUNK_BYTES = 64 << 10


@dataclass(frozen=True)
class StoreAddress:
    """Where a store is, and what opens it."""

    host: str
    port: int
    secret: bytes = field(repr=False)


class ServedStore:
    """A store, reachable at `address`, for as long as the process lives."""

    def __init__(self, host: str):
        """Listens on a free port of `host`, on the interface of that address only.

        Raises:
            InvalidInput: `host` is not this one.
        """
        try:
            inside, outside = socket.create_server((_LOOPBACK, 0)), socket.create_server((host, 0))
        except OSError as error:
            raise InvalidInput(f"--listen {host}: {error.strerror or error}", field="listen") from error
        self._inside_port = inside.getsockname()[1]
        self.tcp_store = dist.TCPStore(
            _LOOPBACK,
            self._inside_port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=inside.detach(),
        )
        self.address = StoreAddress(host, outside.getsockname()[1], secrets.token_bytes(_SECRET_BYTES))
        self._admitted: set[str] = set()
        threading.Thread(target=asyncio.run, args=(self._serve(outside),), name="weight-store", daemon=True).start()

    async def _serve(self, listener: socket.socket) -> None:
        async with await asyncio.start_server(self._answer, sock=listener) as server:
            await server.serve_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host = writer.get_extra_info("peername")[0]
        with contextlib.closing(writer), contextlib.suppress(OSError, EOFError, TimeoutError):
            async with asyncio.timeout(_SILENCE_S):
                first = await reader.read(_CHUNK_BYTES)  # whole: TCPStore closes if its greeting comes in pieces
                if first == _KNOCK:
                    await self._admit(host, reader, writer)
                    return
            if host not in self._admitted:
                log.warning("%s connects to the weight group's store without its secret; refused", host)
                return
            inner_reader, inner_writer = await asyncio.open_connection(_LOOPBACK, self._inside_port)
            inner_writer.write(first)
            await asyncio.gather(_pump(reader, inner_writer), _pump(inner_reader, writer))

    async def _admit(self, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonce = secrets.token_bytes(_SECRET_BYTES)
        writer.write(nonce)
        if hmac.compare_digest(await reader.readexactly(_SECRET_BYTES), _proof(self.address.secret, nonce)):
            self._admitted.add(host)
            writer.write(_WELCOME)
        else:
            log.warning("%s does not know the secret of the weight group's store; refused", host)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.closing(writer), contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()


def connect(address: StoreAddress, timeout_s: float) -> dist.TCPStore:
    """A client of a served store.

    Raises:
        OSError: There is none, or it does not accept the secret.
        RuntimeError: As torch's own.
    """
    with socket.create_connection((address.host, address.port), timeout_s) as gate:
        gate.sendall(_KNOCK)
        nonce = gate.recv(_SECRET_BYTES, socket.MSG_WAITALL)
        gate.sendall(_proof(address.secret, nonce))
        if gate.recv(1) != _WELCOME:
            raise ConnectionRefusedError("it does not accept the secret of this group")
    return dist.TCPStore(
        address.host, address.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )


def _proof(secret: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, nonce, "sha256")
