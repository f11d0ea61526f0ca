"""A TCP proxy in front of a service, whose connections can be cut, silenced, slowed down or damaged."""

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Callable

_CHUNK_BYTES = 1 << 16


class _Connection:
    """One connection of the coordinator and that to the service behind it."""

    def __init__(self, writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter]):
        self.writers = writers
        self.is_silent = False

    def reset(self) -> None:
        """Closes both ends with RST."""
        for writer in self.writers:
            with contextlib.suppress(OSError, AttributeError):
                end = writer.get_extra_info("socket")
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


class Proxy:
    """Listens on a port of its own and passes everything on to `port`."""

    def __init__(self, port: int):
        self._port = port
        self._connections: set[_Connection] = set()
        self._serving: set[asyncio.Task[None] | None] = set()
        self._server: asyncio.Server | None = None
        self.is_cut = False
        """Whether nothing passes, not even a new connection."""
        self.delay_s = 0.0
        self._damage: Callable[[bytes], bytes] | None = None

    async def start(self) -> str:
        """Returns the address."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        self.reset()
        if self._server:
            self._server.close()

    def reset(self) -> None:
        """Resets every connection."""
        for connection in [*self._connections]:
            connection.reset()

    def silence(self) -> None:
        """Makes all connections half-open: they stay, and nothing passes any more. New ones are as ever."""
        for connection in self._connections:
            connection.is_silent = True

    def flip_a_bit(self, number: random.Random) -> None:
        """Flips one bit of the next chunk that has more than a few bytes."""

        def damage(chunk: bytes) -> bytes:
            if len(chunk) < 64:
                return chunk
            self._damage = None
            place, bit = number.randrange(9, len(chunk)), number.randrange(8)
            return chunk[:place] + bytes([chunk[place] ^ 1 << bit]) + chunk[place + 1 :]

        self._damage = damage

    def flip_none(self) -> None:
        """Takes back a flip that no chunk was there for."""
        self._damage = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        connection = _Connection((writer, inner_writer))
        self._connections.add(connection)
        self._serving.add(asyncio.current_task())  # nothing else refers to the task of a half-open connection
        try:
            passing = [
                asyncio.create_task(self._pass(connection, reader, inner_writer)),
                asyncio.create_task(self._pass(connection, inner_reader, writer)),
            ]
            await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
            for task in passing:
                task.cancel()
            await asyncio.gather(*passing, return_exceptions=True)
        finally:
            self._connections.discard(connection)
            self._serving.discard(asyncio.current_task())
            for one in connection.writers:
                one.close()

    async def _pass(self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(_CHUNK_BYTES):
            if connection.is_silent or self.is_cut:
                connection.is_silent = True  # what was lost would be missing from the stream
                continue
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            if self._damage:
                chunk = self._damage(chunk)
            writer.write(chunk)
            await writer.drain()
        if connection.is_silent:
            await asyncio.Event().wait()  # a half-open connection does not pass on its end either
