"""Serves one page over HTTP to a limited number of connections, each for a limited time.

The server of prometheus_client starts a thread for every connection and waits in it without a limit.
"""

import asyncio
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
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(where[:2], family=family)
        self.port: int = listener.getsockname()[1]
        self._page, self._content_type = page, content_type
        self._open: dict[asyncio.StreamWriter, None] = {}  # the oldest first
        self._runner, self._closing = asyncio.Runner(loop_factory=asyncio.new_event_loop), asyncio.Event()
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._run, args=(listener,), name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening and closes all connections."""
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def _run(self, listener: socket.socket) -> None:
        with self._runner:  # its end cancels what is still being answered
            self._runner.run(self._serve(listener))

    async def _serve(self, listener: socket.socket) -> None:
        async with await asyncio.start_server(self._answer, sock=listener):
            await self._closing.wait()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= _MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        self._open[writer] = None
        try:
            async with asyncio.timeout(_CONNECTION_S):
                head = await reader.readuntil(b"\r\n\r\n")
                is_get = head.startswith(b"GET ")
                status, body = ("200 OK", self._page()) if is_get else ("405 Method Not Allowed", b"")
                fields = f"Content-Type: {self._content_type}\r\nContent-Length: {len(body)}\r\nConnection: close"
                writer.write(f"HTTP/1.1 {status}\r\n{fields}\r\n\r\n".encode() + body)
                writer.close()
                await writer.wait_closed()  # until all is sent
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client is gone, sends nothing or too much, or does not read
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()
