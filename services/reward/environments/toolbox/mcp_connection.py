"""Holds one session of an MCP server, which is a process that we start or an address.

anyio requires that only the task that opened the session uses it. Other tasks send it requests with `ask`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from services.common.config.environment import McpToolConfig
from services.reward.errors import EnvironmentFailure, EpisodeError

if TYPE_CHECKING:
    from mcp import ClientSession

Answer = TypeVar("Answer")
START_TIMEOUT_S = 60.0
"""Time limit for a session to begin; its server may import much."""
_CLOSE_S = 10.0
"""How long the end of a session may take; a process is killed by then."""
_MAX_DETAIL_CHARS = 500


class Connection:
    """Opens a session at once and keeps it until `close`."""

    def __init__(self, config: McpToolConfig):
        self._config = config
        self._session: asyncio.Future[ClientSession] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._asked: set[asyncio.Future[Any]] = set()
        self._holding = asyncio.create_task(self._hold())

    async def ask(self, request: Callable[[ClientSession], Awaitable[Answer]]) -> Answer:
        """Returns the answer to a request.

        Raises:
            EpisodeError: TIMEOUT if there is none within `timeout_s`, CRASHED if the session did not begin or ended.
            Exception: Whatever else the request raises, such as MCPError.
        """
        session = await self._limited(asyncio.shield(self._session), START_TIMEOUT_S)
        asked = asyncio.ensure_future(request(session))
        self._asked.add(asked)
        try:
            return await self._limited(asked, self._config.timeout_s)
        finally:
            asked.cancel()
            self._asked.discard(asked)

    async def close(self) -> None:
        """Ends the session after the requests in progress, which have time limits."""
        if self._asked:
            await asyncio.wait(self._asked, timeout=self._config.timeout_s)
        self._closing.set()
        await asyncio.wait({self._holding}, timeout=_CLOSE_S)
        self._holding.cancel()
        await asyncio.wait({self._holding}, timeout=_CLOSE_S)

    async def _limited(self, answer: asyncio.Future[Answer], timeout_s: float) -> Answer:
        await asyncio.wait({answer, self._holding}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        if self._holding.done():
            raise failed(EnvironmentFailure.CRASHED, f"{self._config.place}: {explain(self._holding.exception())}")
        raise failed(EnvironmentFailure.TIMEOUT, f"{self._config.place}: no answer within {timeout_s:g} s")

    async def _hold(self) -> None:
        from mcp import ClientSession

        async with self._streams() as (read, write), ClientSession(read, write) as session:
            await session.initialize()
            self._session.set_result(session)
            await self._closing.wait()

    def _streams(self) -> AbstractAsyncContextManager[tuple[Any, Any]]:
        if self._config.url:
            from mcp.client.streamable_http import streamable_http_client

            return streamable_http_client(self._config.url)
        from mcp.client.stdio import StdioServerParameters, stdio_client

        command, *arguments = self._config.command
        return stdio_client(StdioServerParameters(command=command, args=arguments))


def failed(reason: EnvironmentFailure, detail: str) -> EpisodeError:
    """Returns the failure of a server."""
    return EpisodeError(reason, f"mcp {detail[:_MAX_DETAIL_CHARS]}")


def explain(error: BaseException | None) -> str:
    """Returns what happened, which anyio wraps in groups of one."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if error else "the session ended"
