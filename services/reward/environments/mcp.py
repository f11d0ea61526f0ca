"""Calls the tools of an MCP server (Model Context Protocol), over stdio or streamable HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from services.common.config.environment import McpToolConfig
from services.common.tasks import keep
from services.common.tool_syntax import Schema, ToolCall
from services.reward.environments.base import BadArgumentsError, cut_middle, tool_schema
from services.reward.errors import EnvironmentFailure, EpisodeError, ScoringError
from services.reward.remote import read_key

if TYPE_CHECKING:
    import httpx2
    from mcp import ClientSession
    from mcp.types import ContentBlock, Implementation, Tool

Answer = TypeVar("Answer")
_START_TIMEOUT_S = 60.0  # for a session to begin; its server may import much
_CLOSE_S = 10.0  # for the end of a session; a process is killed by then
_MAX_DETAIL_CHARS = 500
_MAX_TOOLS = 1000
_QUERY = re.compile(r"(?<=[^\s'\"?])\?[^\s'\"]*")


class Connection:
    """Opens a session at once and keeps it until `close`."""

    def __init__(self, config: McpToolConfig, env: dict[str, str], headers: dict[str, str]):
        self._config, self._env, self._headers = config, env, headers
        self._session: asyncio.Future[ClientSession] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._requests: set[asyncio.Future[Any]] = set()
        self.refusal = ""
        """The last HTTP status with which a message was refused."""
        self._holding = asyncio.create_task(self._keep_session())

    async def ask(self, request: Callable[[ClientSession], Awaitable[Answer]]) -> Answer:
        """Returns the answer to a request, or raises EpisodeError or what the request raises, such as MCPError."""
        session = await self._answer_in_time(asyncio.shield(self._session), _START_TIMEOUT_S)
        answer = asyncio.ensure_future(request(session))
        self._requests.add(answer)
        try:
            return await self._answer_in_time(answer, self._config.timeout_s)
        finally:
            answer.cancel()
            self._requests.discard(answer)

    async def close(self) -> None:
        if self._requests:
            await asyncio.wait(self._requests, timeout=self._config.timeout_s)
        self._closing.set()
        await asyncio.wait({self._holding}, timeout=_CLOSE_S)
        self._holding.cancel()
        await asyncio.wait({self._holding}, timeout=_CLOSE_S)

    async def _answer_in_time(self, answer: asyncio.Future[Answer], timeout_s: float) -> Answer:
        await asyncio.wait({answer, self._holding}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        if self._holding.done():
            detail = describe_error(self._config, self._holding.exception()) + self.refusal
            raise failed(EnvironmentFailure.CRASHED, detail)
        raise failed(EnvironmentFailure.TIMEOUT, f"{self._config.place}: no answer within {timeout_s:g} s")

    async def _keep_session(self) -> None:
        from mcp import ClientSession

        async with self._streams() as (read, write), ClientSession(read, write) as session:
            await session.initialize()
            self._session.set_result(session)
            await self._closing.wait()

    @asynccontextmanager
    async def _streams(self) -> AsyncIterator[tuple[Any, Any]]:
        if self._config.url:
            from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

            client = create_mcp_http_client(self._headers)
            client.event_hooks = {"response": [self._note_refusal]}
            async with client, streamable_http_client(self._config.url, http_client=client) as streams:
                yield streams
        else:
            from mcp.client.stdio import StdioServerParameters, stdio_client

            command, *arguments = self._config.command
            async with stdio_client(StdioServerParameters(command=command, args=arguments, env=self._env)) as streams:
                yield streams

    async def _note_refusal(self, response: httpx2.Response) -> None:
        # 400 and 404 may be the policy's: servers may answer with them that a call has wrong arguments.
        if response.request.method == "POST" and response.is_error and response.status_code not in (400, 404):
            self.refusal = f" (status {response.status_code})"


def failed(reason: EnvironmentFailure, detail: str) -> EpisodeError:
    return EpisodeError(reason, f"mcp {detail[:_MAX_DETAIL_CHARS]}")


def describe_error(config: McpToolConfig, error: BaseException | None) -> str:
    """Returns what to say about an error of a server, without queries of URLs, which may have a key."""
    while isinstance(error, BaseExceptionGroup):  # anyio wraps errors in groups of one
        error = error.exceptions[0]
    what = f"{type(error).__name__}: {error}" if error else "the session ended"
    return f"{config.place}: {_QUERY.sub('', what)}"


class McpTools:
    """Offers the tools that a server lists. All episodes share one session, so the tools must keep no state.

    A session that broke or did not answer in time is replaced by a new one with the next call.
    """

    def __init__(self, config: McpToolConfig):
        self._config = config
        self._env, self._headers = dict[str, str](), dict[str, str]()
        self._connection: Connection | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self.schemas: Sequence[Schema] = ()
        self.version = ""

    async def open(self) -> None:
        try:
            import mcp  # noqa: F401
        except ImportError as error:
            detail = f"tools of kind mcp need the package mcp ({error}): pip install 'lockstep-rl[mcp]'"
            raise EpisodeError(EnvironmentFailure.CRASHED, detail) from error
        self._read_secrets()
        try:
            tools, server = await self._connected().ask(_list_tools)
        except EpisodeError:
            raise
        except Exception as error:
            raise failed(EnvironmentFailure.CRASHED, describe_error(self._config, error)) from error
        names = [tool.name for tool in tools]
        if missing := [name for name in self._config.names if name not in names]:
            detail = f"{self._config.place} has no tool {missing[0]}, but {', '.join(names) or 'none'}"
            raise failed(EnvironmentFailure.REFUSED, detail)
        wanted = [tool for tool in tools if not self._config.names or tool.name in self._config.names]
        if not wanted:
            raise failed(EnvironmentFailure.REFUSED, f"{self._config.place} has no tools")
        self.schemas = [tool_schema(tool.name, tool.description or "", tool.input_schema) for tool in wanted]
        digest = hashlib.sha256(json.dumps(self.schemas, sort_keys=True).encode()).hexdigest()[:12]
        self.version = f"mcp-{server.name} {server.version}-{digest}"

    def _read_secrets(self) -> None:
        if missing := [name for name in self._config.pass_env if name not in os.environ]:
            raise failed(EnvironmentFailure.REFUSED, f"pass_env: the reward service has no variable {missing[0]}")
        self._env = {name: os.environ[name] for name in self._config.pass_env}
        if self._config.api_key_file:
            try:
                self._headers = {"Authorization": f"Bearer {read_key(Path(self._config.api_key_file))}"}
            except ScoringError as error:
                raise failed(EnvironmentFailure.REFUSED, error.detail) from error

    async def call(self, call: ToolCall) -> str:
        """Raises BadArgumentsError if the server says that the call was wrong, EpisodeError if it failed."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INTERNAL_ERROR, INVALID_REQUEST, PARSE_ERROR, REQUEST_TIMEOUT

        connection = self._connected()
        try:
            result = await connection.ask(lambda session: session.call_tool(call.name, dict(call.arguments)))
        except MCPError as error:
            broken = [CONNECTION_CLOSED, INVALID_REQUEST, PARSE_ERROR, REQUEST_TIMEOUT]
            broken += [INTERNAL_ERROR] if connection.refusal else []  # such as of a gateway that is overloaded
            if error.code not in broken:
                raise BadArgumentsError(self._cut(error.message)) from error  # the server lives, and says no
            self._replace(connection)
            detail = f"{self._config.place}: {error.message}{connection.refusal}"
            raise failed(EnvironmentFailure.CRASHED, detail) from error
        except EpisodeError:
            self._replace(connection)
            raise
        except RuntimeError as error:  # the result is not of the schema that the server gave, or asks for an input
            raise failed(EnvironmentFailure.INVALID_REPLY, describe_error(self._config, error)) from error
        except Exception as error:
            self._replace(connection)
            raise failed(EnvironmentFailure.CRASHED, describe_error(self._config, error)) from error
        parts = [_text(part) for part in result.content]
        if not any(part.type == "text" for part in result.content) and result.structured_content is not None:
            parts.append(json.dumps(result.structured_content, ensure_ascii=False))
        text = self._cut("\n".join(parts))
        if result.is_error:
            raise BadArgumentsError(text)
        return text

    async def close(self) -> None:
        if self._connection:
            self._replace(self._connection)
        await asyncio.gather(*self._closing)

    def _connected(self) -> Connection:
        self._connection = self._connection or Connection(self._config, self._env, self._headers)
        return self._connection

    def _replace(self, connection: Connection) -> None:
        """Lets the next call open another session. This one ends after its other calls."""
        if self._connection is connection:
            self._connection = None
            keep(self._closing, connection.close())

    def _cut(self, text: str) -> str:
        return cut_middle(text, self._config.max_output_chars)


def _text(part: ContentBlock) -> str:
    """Returns what the policy is shown of a part of a result."""
    if part.type == "text":
        return part.text
    if part.type == "resource_link":
        return str(part.uri)
    if part.type == "resource" and (text := getattr(part.resource, "text", None)) is not None:
        return text
    return f"[{part.type} left out]"


async def _list_tools(session: ClientSession) -> tuple[list[Tool], Implementation]:
    from mcp.types import PaginatedRequestParams

    tools: list[Tool] = []
    cursor = None
    while len(tools) < _MAX_TOOLS:
        page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor) if cursor else None)
        tools += page.tools
        if not (cursor := page.next_cursor):
            break
    assert session.server_info is not None, "the session has begun"
    return tools, session.server_info
