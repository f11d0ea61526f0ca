"""The store through which the members of a weight group meet, behind a gate that wants a secret.

torch's TCPStore asks nobody who they are: whoever can connect can list all keys, read, change and delete them, and it
listens on every interface. Here it listens on loopback, and the gate before it lets a connection through that has
proved to know the secret. Every run has a secret of its own, which travels in calls only, so over mTLS.
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
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch.distributed as dist

from services.common.errors import InvalidInput
from services.common.weights.passage import CHUNK_BYTES, KNOCK, NONCE_BYTES, WELCOME, Passage, knock, proof, pump

log = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
# Whoever connects says this soon what it wants.
_SILENCE_S = 10.0


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
        self.address = StoreAddress(host, outside.getsockname()[1], secrets.token_bytes(NONCE_BYTES))
        self._admitted: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        serving = self._serve(outside)
        threading.Thread(
            target=self._loop.run_until_complete, args=(serving,), name="weight-store", daemon=True
        ).start()

    def renew(self) -> StoreAddress:
        """Another secret in the place of the one before, which admits nobody from now on; ends what it admitted."""
        self.address = replace(self.address, secret=secrets.token_bytes(NONCE_BYTES))
        self._loop.call_soon_threadsafe(self._end_connections)
        return self.address

    def _end_connections(self) -> None:
        for connection in self._admitted:
            connection.cancel()

    async def _serve(self, listener: socket.socket) -> None:
        async with await asyncio.start_server(self._answer, sock=listener) as server:
            await server.serve_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection
        self._admitted.add(connection)
        try:
            with contextlib.closing(writer), contextlib.suppress(OSError, EOFError, TimeoutError):
                async with asyncio.timeout(_SILENCE_S):
                    if not await self._admits(reader, writer):
                        host = writer.get_extra_info("peername")[0]
                        log.warning("%s does not know the secret of this run's weight group; refused", host)
                        return
                    first = await reader.read(CHUNK_BYTES)  # whole: TCPStore closes if its greeting comes in pieces
                if first:
                    await self._let_through(first, reader, writer)
        finally:
            self._admitted.discard(connection)

    async def _admits(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if await reader.read(1) != KNOCK:
            return False
        nonce = secrets.token_bytes(NONCE_BYTES)
        writer.write(nonce)
        given = await reader.readexactly(NONCE_BYTES)
        if not hmac.compare_digest(given, proof(self.address.secret, nonce)):
            return False
        writer.write(WELCOME)
        return True

    async def _let_through(self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection(_LOOPBACK, self._inside_port)
        with contextlib.closing(inner_writer):
            inner_writer.write(first)
            await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))


class StoreClient(dist.TCPStore):
    """A client of a served store, each of whose connections is proved to the gate; `leave` it.

    Raises:
        OSError: There is none, or it does not accept the secret.
        RuntimeError: As torch's own.
    """

    def __init__(self, address: StoreAddress, timeout_s: float):
        outside = (address.host, address.port)
        knock(outside, address.secret, timeout_s)
        self._passage = Passage(outside, address.secret)
        timeout = timedelta(seconds=timeout_s)
        try:
            super().__init__(_LOOPBACK, self._passage.port, is_master=False, wait_for_workers=False, timeout=timeout)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Nothing more is connected; what is goes on until it is closed."""
        self._passage.close()
