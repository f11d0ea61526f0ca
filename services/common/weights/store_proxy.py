"""Runs a proxy through which torch's TCPStore client, which cannot authenticate, connects to a weight group's store.

The client connects to a loopback port that accepts only this process. The proxy connects it to the gate of the store,
and starts each of these connections by proving, with an HMAC over a fresh nonce, that it knows the secret.
"""

import asyncio
import contextlib
import hmac
import logging
import socket
import threading

import psutil

log = logging.getLogger(__name__)

HELLO, ACCEPTED = b"\xfe", b"\xff"
NONCE_BYTES = 32
CHUNK_BYTES = 64 << 10
_LOOPBACK = "127.0.0.1"
# The gate answers immediately or not at all.
_TIMEOUT_S = 10.0


def proof(secret: bytes, nonce: bytes) -> bytes:
    """Returns the HMAC that proves knowledge of `secret` for this `nonce`."""
    return hmac.digest(secret, nonce, "sha256")


def authenticate(gate: tuple[str, int], secret: bytes, timeout_s: float) -> None:
    """Checks that the gate accepts the secret.

    Raises:
        OSError: The gate rejects the secret or cannot be reached.
    """
    with socket.create_connection(gate, timeout_s) as connection:
        connection.sendall(HELLO)
        answers = connection.makefile("rb")
        connection.sendall(proof(secret, answers.read(NONCE_BYTES)))
        if answers.read(1) != ACCEPTED:
            raise ConnectionRefusedError("it does not accept the secret of this group")


class StoreProxy:
    """Proxies connections that this process makes to the loopback port `port`. Call `close` when done."""

    def __init__(self, gate: tuple[str, int], secret: bytes):
        self._gate, self._secret = gate, secret
        listener = socket.create_server((_LOOPBACK, 0))
        self.port = listener.getsockname()[1]
        self._loop, self._closing = asyncio.new_event_loop(), asyncio.Event()
        threading.Thread(target=self._run, args=(listener,), name="weight-store-proxy", daemon=True).start()

    def close(self) -> None:
        """Accepts no more connections. Open connections stay until either end closes them."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, because close was called before
            self._loop.call_soon_threadsafe(self._closing.set)

    def _run(self, listener: socket.socket) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve(listener))

    async def _serve(self, listener: socket.socket) -> None:
        connections: set[asyncio.Task[None]] = set()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task
            connections.add(task)
            with contextlib.closing(writer), contextlib.suppress(OSError, EOFError, TimeoutError):
                await self._pass(reader, writer)

        server = await asyncio.start_server(answer, sock=listener)
        await self._closing.wait()
        server.close()
        await asyncio.gather(*connections)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = writer.get_extra_info("peername")[:2]
        # The address matters too: another loopback address may use the same port as a connection of this process.
        if host != _LOOPBACK or not _is_of_this_process(port, self.port):
            log.warning("refused another process on port %d, which is for this process's weight group", self.port)
            return
        async with asyncio.timeout(_TIMEOUT_S):
            outer_reader, outer_writer = await asyncio.open_connection(*self._gate)
            with contextlib.ExitStack() as unless_accepted:
                unless_accepted.callback(outer_writer.close)
                outer_writer.write(HELLO)
                outer_writer.write(proof(self._secret, await outer_reader.readexactly(NONCE_BYTES)))
                await outer_reader.readexactly(1)
                unless_accepted.pop_all()
        await asyncio.gather(forward_bytes(reader, outer_writer), forward_bytes(outer_reader, writer))


async def forward_bytes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forwards all data from `reader` to `writer` until either end closes."""
    with contextlib.closing(writer), contextlib.suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()


def _is_of_this_process(port: int, listening: int) -> bool:
    found = psutil.Process().net_connections("tcp")
    return any(one.raddr and (one.laddr.port, one.raddr.port) == (port, listening) for one in found)
