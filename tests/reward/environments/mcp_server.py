"""Runs a tiny MCP server over stdio or, with `http PORT`, over streamable HTTP."""

import asyncio
import os
import sys

from mcp import MCPError
from mcp.server import MCPServer
from mcp.server.mcpserver.context import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult, EmbeddedResource, ResourceLink, TextResourceContents

server = MCPServer("tiny", version="1.2")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def page(size: int) -> str:
    """Returns a long page."""
    return "ab" * size


@server.tool()
def refuse(what: str) -> str:
    """Finds nothing."""
    raise ToolError(f"there is no {what}")


@server.tool()
async def wait() -> str:
    """Never answers."""
    await asyncio.Event().wait()
    return ""


@server.tool()
def variable(of: str) -> str:
    """Returns an environment variable."""
    return os.environ.get(of, "")


@server.tool()
async def said(of: str, ctx: Context) -> str:
    """Returns a header of the request."""
    return ctx.request_context.request.headers.get(of, "")


@server.tool()
def parts() -> CallToolResult:
    """Returns the text of a file and a link."""
    file = TextResourceContents(uri="file:///a", text="a file")
    content = [
        EmbeddedResource(type="resource", resource=file),
        ResourceLink(type="resource_link", uri="file:///b", name="b"),
    ]
    return CallToolResult(content=content)


@server.tool()
def structured() -> CallToolResult:
    """Returns no text."""
    return CallToolResult(content=[], structured_content={"x": 42})


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


def reject(code: int) -> str:
    """Answers with an error of the protocol."""
    raise MCPError(code, "the table is locked")


if __name__ == "__main__":
    if sys.argv[1:2] == ["rejects"]:
        server.tool()(reject)
    if sys.argv[1:2] == ["http"]:
        server.run("streamable-http", port=int(sys.argv[2]))
    else:
        server.run("stdio")
