"""Calls the tools of an MCP server (Model Context Protocol), over stdio or streamable HTTP."""

import asyncio
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from services.common.config.environment import McpToolConfig
from services.reward.environments.base import ToolCall
from services.reward.environments.tool_calls.schema import Schema, tool_schema
from services.reward.environments.toolbox.base import BadArgumentsError, cut_middle
from services.reward.environments.toolbox.mcp_connection import Connection, explain, failed
from services.reward.errors import EnvironmentFailure, EpisodeError

_MAX_TOOLS = 1000


class McpTools:
    """Offers the tools that a server lists. All episodes share one session, so the tools must keep no state.

    A session that broke or did not answer in time is replaced by a new one with the next call.
    """

    def __init__(self, config: McpToolConfig):
        self._config = config
        self._connection: Connection | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self.schemas: Sequence[Schema] = ()
        self.version = ""

    async def open(self) -> None:
        """Opens a session and asks for the tools.

        Raises:
            EpisodeError: The package is missing, the server does not answer, or it lacks a wanted tool.
        """
        _require_package()
        try:
            tools, server = await self._connected().ask(_list_tools)
        except EpisodeError:
            raise
        except Exception as error:
            raise failed(EnvironmentFailure.CRASHED, f"{self._config.place}: {explain(error)}") from error
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

    async def call(self, call: ToolCall) -> str:
        """Returns the text of a tool's result.

        Raises:
            BadArgumentsError: The server says that the call was wrong, or had no result, or raised an exception.
            EpisodeError: The server failed.
        """
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INVALID_REQUEST, PARSE_ERROR, REQUEST_TIMEOUT

        connection = self._connected()
        try:
            result = await connection.ask(lambda session: session.call_tool(call.name, dict(call.arguments)))
        except MCPError as error:
            if error.code not in (CONNECTION_CLOSED, INVALID_REQUEST, PARSE_ERROR, REQUEST_TIMEOUT):
                raise BadArgumentsError(self._cut(error.message)) from error  # the server lives, and says no
            self._replace(connection)
            raise failed(EnvironmentFailure.CRASHED, f"{self._config.place}: {error.message}") from error
        except EpisodeError:
            self._replace(connection)
            raise
        except RuntimeError as error:  # the result is not of the schema that the server gave, or asks for an input
            raise failed(EnvironmentFailure.INVALID_REPLY, f"{self._config.place}: {explain(error)}") from error
        except Exception as error:
            self._replace(connection)
            raise failed(EnvironmentFailure.CRASHED, f"{self._config.place}: {explain(error)}") from error
        text = self._cut("\n".join(map(_text, result.content)))
        if result.is_error:
            raise BadArgumentsError(text)
        return text

    async def close(self) -> None:
        """Ends all sessions."""
        if self._connection:
            self._replace(self._connection)
        await asyncio.gather(*self._closing)

    def _connected(self) -> Connection:
        self._connection = self._connection or Connection(self._config)
        return self._connection

    def _replace(self, connection: Connection) -> None:
        """Lets the next call open another session. This one ends after its other calls."""
        if self._connection is connection:
            self._connection = None
            closing = asyncio.create_task(connection.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _cut(self, text: str) -> str:
        return cut_middle(text, self._config.max_output_chars)


async def _list_tools(session: Any) -> tuple[list[Any], Any]:
    """Returns the tools and the server's name and version."""
    tools, cursor = [], None
    while len(tools) < _MAX_TOOLS:
        page = await session.list_tools(params=_page(cursor))
        tools += page.tools
        if not (cursor := page.next_cursor):
            break
    return tools, session.server_info


def _page(cursor: str | None) -> Any:
    from mcp.types import PaginatedRequestParams

    return PaginatedRequestParams(cursor=cursor) if cursor else None


def _text(content: Any) -> str:
    return content.text if content.type == "text" else f"[{content.type} left out]"


def _require_package() -> None:
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        detail = f"tools of kind mcp need the package mcp ({error}): pip install 'lockstep-rl[mcp]'"
        raise EpisodeError(EnvironmentFailure.CRASHED, detail) from error
