"""Serves scorers that ask a server: real HTTP on loopback, with answers that a test chooses."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web

Reply = Callable[[Any, web.Request], Awaitable[web.StreamResponse]]


class RemoteEnd:
    """Answers each request with what `reply` makes of its JSON; keeps the JSON and headers of all requests."""

    def __init__(self, reply: Reply):
        self._reply = reply
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.headers.append(dict(request.headers))
        self.bodies.append(await request.json())
        return await self._reply(self.bodies[-1], request)


@contextlib.asynccontextmanager
async def served(reply: Reply) -> AsyncIterator[RemoteEnd]:
    """Yields a RemoteEnd that serves on a free port of loopback."""
    end, app = RemoteEnd(reply), web.Application(client_max_size=64 << 20)
    app.router.add_post("/{path:.*}", end.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        end.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield end
    finally:
        await runner.cleanup()


def chat(content: object) -> web.Response:
    """Returns the response that has `content` as a chat completion."""
    return web.json_response({"choices": [{"message": {"role": "assistant", "content": content}}]})
