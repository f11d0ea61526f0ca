"""Serves one page over HTTP to a limited number of connections, each for a limited time.

The server of prometheus_client starts a thread for every connection and waits in it without a limit.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable

# A connection is closed after this time, whether it has sent a request or not.
_CONNECTION_S = 10.0
# One more connection closes the oldest, so that idle ones keep nobody out.
_MAX_CONNECTIONS = 64


class PageServer:
    """Answers every GET request from a thread with what `page` returns, as `content_type`."""

    def __init__(self, host: str, port: int, page: Callable[[], bytes], content_type: str):
        """Listens; port 0 picks a free port.

        Raises:
            OSError: The port is in use, or `host` is not an address of this machine.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
        self.port: int = listener.getsockname()[1]
        self._page, self._content_type = page, content_type
        self._connections: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._loop, self._closing = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=(listener,), name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening and closes all connections."""
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def _run(self, listener: socket.socket) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve(listener))

    async def _serve(self, listener: socket.socket) -> None:
        async with await asyncio.start_server(self._connect, sock=listener):
            await self._closing.wait()
            for connection in self._connections:
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= _MAX_CONNECTIONS:
            next(iter(self._connections)).cancel()
        connection = asyncio.get_running_loop().create_task(self._answer(reader, writer))
        self._connections[connection] = None
        connection.add_done_callback(self._connections.pop)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_CONNECTION_S):
                head = await reader.readuntil(b"\r\n\r\n")
                is_get = head.startswith(b"GET ")
                status, body = ("200 OK", self._page()) if is_get else ("405 Method Not Allowed", b"")
                fields = f"Content-Type: {self._content_type}\r\nContent-Length: {len(body)}\r\nConnection: close"
                writer.write(f"HTTP/1.1 {status}\r\n{fields}\r\n\r\n".encode() + body)
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # whoever it is has gone, sends nothing or too much, or does not read
        finally:
            writer.transport.abort()
