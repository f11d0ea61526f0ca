"""Serves the store through which the members of a weight group find each other, behind a gate that requires a secret.

torch's TCPStore has no authentication: anybody who can connect can list, read, change and delete all keys, and it
listens on every interface. Here it listens on loopback only, and a gate in front of it admits only connections that
prove that they know the secret. Every run has its own secret, which is sent only in gRPC calls and therefore over mTLS.
"""

# pyright: reportPrivateImportUsage=false
# torch exports its stores and process groups without saying so.

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
import threading
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field, replace
from datetime import timedelta

import psutil
import torch.distributed as dist

from services.common.errors import InvalidInput

log = logging.getLogger(__name__)

ONLY_IPV4 = "weights travel over IPv4; give an IPv4 address of the trainer or a name that has one"
HELLO, ACCEPTED = b"\xfe", b"\xff"
NONCE_BYTES = 32
_CHUNK_BYTES = 64 << 10
_LOOPBACK = "127.0.0.1"
# The gate answers immediately or not at all.
_TIMEOUT_S = 10.0
# A client must prove the secret and send its first bytes within this time.
_SILENCE_S = 10.0
# Secrets that are remembered after they were replaced, to tell members of earlier runs from strangers in the log.
_NUM_REPLACED = 16


def _proof(secret: bytes, nonce: bytes) -> bytes:
    """Returns the HMAC that proves knowledge of `secret` for this `nonce`."""
    return hmac.digest(secret, nonce, "sha256")


def _authenticate(gate: tuple[str, int], secret: bytes, timeout_s: float) -> None:
    """Checks that the gate accepts the secret.

    Raises:
        OSError: The gate rejects the secret or cannot be reached.
    """
    with socket.create_connection(gate, timeout_s) as connection:
        connection.sendall(HELLO)
        answers = connection.makefile("rb")
        connection.sendall(_proof(secret, answers.read(NONCE_BYTES)))
        if answers.read(1) != ACCEPTED:
            raise ConnectionRefusedError("it does not accept the secret of this group")


class _Relay(ABC):
    """Answers the connections to a listening socket in a thread of its own, whose loop runs until `close`."""

    def __init__(self, listener: socket.socket, name: str):
        self._connections: set[asyncio.Task[None]] = set()
        self._loop, self._closing = asyncio.new_event_loop(), asyncio.Event()
        threading.Thread(target=self._run, args=(listener,), name=name, daemon=True).start()

    def close(self) -> None:
        """Accepts no more connections. Open connections stay until either end closes them."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, because close was called before
            self._loop.call_soon_threadsafe(self._closing.set)

    def _run(self, listener: socket.socket) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve(listener))

    async def _serve(self, listener: socket.socket) -> None:
        server = await asyncio.start_server(self._answer, sock=listener)
        await self._closing.wait()
        server.close()
        await asyncio.gather(*self._connections)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection
        self._connections.add(connection)
        expected = (OSError, EOFError, TimeoutError, asyncio.CancelledError)  # asyncio logs a traceback of the last
        try:
            with contextlib.closing(writer), contextlib.suppress(*expected):
                await self._serve_connection(reader, writer)
        finally:
            self._connections.discard(connection)

    @abstractmethod
    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Checks who has connected, and forwards data between it and the store."""


class _Proxy(_Relay):
    """Proxies connections that this process makes to the loopback port `port`. Call `close` when done."""

    def __init__(self, gate: tuple[str, int], secret: bytes):
        self._gate, self._secret = gate, secret
        listener = socket.create_server((_LOOPBACK, 0))
        self.port = listener.getsockname()[1]
        super().__init__(listener, "weight-store-proxy")

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = writer.get_extra_info("peername")[:2]
        # The address matters too: another loopback address may use the same port as a connection of this process.
        if host != _LOOPBACK or not _is_of_this_process(port, self.port):
            log.warning("refused another process on port %d, which is for this process's weight group", self.port)
            return
        async with asyncio.timeout(_TIMEOUT_S):
            gate_reader, gate_writer = await asyncio.open_connection(*self._gate)
        with contextlib.closing(gate_writer):
            async with asyncio.timeout(_TIMEOUT_S):
                gate_writer.write(HELLO)
                gate_writer.write(_proof(self._secret, await gate_reader.readexactly(NONCE_BYTES)))
                await gate_reader.readexactly(1)
            await asyncio.gather(_forward(reader, gate_writer), _forward(gate_reader, writer))


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forwards all data from `reader` to `writer` until either end closes."""
    with contextlib.closing(writer), contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()


def _is_of_this_process(port: int, listening: int) -> bool:
    connections = psutil.Process().net_connections("tcp")
    return any(one.raddr and (one.laddr.port, one.raddr.port) == (port, listening) for one in connections)


@dataclass(frozen=True)
class StoreAddress:
    """The address of a store and the secret that it requires."""

    host: str
    port: int
    secret: bytes = field(repr=False)


class ServedStore(_Relay):
    """Serves a store at `address` until the process ends."""

    def __init__(self, host: str):
        """Listens on a free port, only on the interface that has the address `host`."""
        if host.startswith("["):
            raise InvalidInput(f"--listen {host}: {ONLY_IPV4}, or 0.0.0.0 for all", field="listen")
        try:
            behind_gate, gate = socket.create_server((_LOOPBACK, 0)), socket.create_server((host, 0))
        except OSError as error:
            raise InvalidInput(f"--listen {host}: {error.strerror or error}", field="listen") from error
        self._port_behind_gate = behind_gate.getsockname()[1]
        self.tcp_store = dist.TCPStore(
            _LOOPBACK,
            self._port_behind_gate,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            # By itself, torch would listen on every interface.
            master_listen_fd=behind_gate.detach(),
        )
        self.address = StoreAddress(host, gate.getsockname()[1], secrets.token_bytes(NONCE_BYTES))
        self._replaced: deque[bytes] = deque(maxlen=_NUM_REPLACED)
        super().__init__(gate, "weight-store")

    def renew(self) -> StoreAddress:
        """Replaces the secret and closes all connections that the old secret admitted."""
        self._replaced.append(self.address.secret)
        self.address = replace(self.address, secret=secrets.token_bytes(NONCE_BYTES))
        self._loop.call_soon_threadsafe(self._end_connections)
        return self.address

    def _end_connections(self) -> None:
        for connection in self._connections:
            connection.cancel()

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host = writer.get_extra_info("peername")[0]
        async with asyncio.timeout(_SILENCE_S):
            if not await self._admits(reader, writer, host):
                return
            # Read the greeting whole: TCPStore closes the connection if it arrives in pieces.
            greeting = await reader.read(_CHUNK_BYTES)
        if not greeting:
            return
        store_reader, store_writer = await asyncio.open_connection(_LOOPBACK, self._port_behind_gate)
        with contextlib.closing(store_writer):
            store_writer.write(greeting)
            await asyncio.gather(_forward(reader, store_writer), _forward(store_reader, writer))

    async def _admits(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> bool:
        nonce, answer = secrets.token_bytes(NONCE_BYTES), b""
        if await reader.read(1) == HELLO:
            writer.write(nonce)
            answer = await reader.readexactly(NONCE_BYTES)
        if hmac.compare_digest(answer, _proof(self.address.secret, nonce)):
            writer.write(ACCEPTED)
            return True
        if any(hmac.compare_digest(answer, _proof(secret, nonce)) for secret in list(self._replaced)):
            log.info("refused %s: it is a member of the weight group of a run that was replaced or has ended", host)
        else:
            log.warning("refused %s: it does not know the secret of this run's weight group", host)
        return False


class StoreClient(dist.TCPStore):
    """A TCPStore client that authenticates each of its connections to the gate. Call `leave` when done.

    Raises:
        OSError: There is no store at the address, or it does not accept the secret.
        RuntimeError: As torch's TCPStore raises it.
    """

    def __init__(self, address: StoreAddress, timeout_s: float):
        gate = (address.host, address.port)
        _authenticate(gate, address.secret, timeout_s)
        self._proxy = _Proxy(gate, address.secret)
        timeout = timedelta(seconds=timeout_s)
        try:
            super().__init__(_LOOPBACK, self._proxy.port, is_master=False, wait_for_workers=False, timeout=timeout)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Makes no more connections. Open connections stay until they are closed."""
        self._proxy.close()
