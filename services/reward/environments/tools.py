"""Lets the policy call tools: the user's functions, those of MCP servers, and those of toolbox/."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from services.common.config.environment import ToolsEnvironmentConfig
from services.reward.environments.base import Message, ToolCall
from services.reward.environments.tool_calls.calling import CallingEnvironment
from services.reward.environments.tool_calls.schema import find_fault, fitted
from services.reward.environments.toolbox.base import BadArgumentsError, Tool
from services.reward.environments.toolbox.calculator import Calculator
from services.reward.environments.toolbox.function import FunctionTools
from services.reward.environments.toolbox.mcp import McpTools
from services.reward.environments.toolbox.python import Python
from services.reward.environments.toolbox.search import Search
from services.reward.errors import EpisodeError

TOOLS: Mapping[str, Callable[..., Tool]] = {"python": Python, "search": Search, "calculator": Calculator}
"""Maps the kinds of tools that are one tool to their classes. `function` and `mcp` are not among them."""


class ToolsEnvironment(CallingEnvironment):
    """Checks each call against the tool's schema, then makes it."""

    def __init__(self, config: ToolsEnvironmentConfig):
        super().__init__(config)
        self._tools = {tool.kind: TOOLS[tool.kind](tool) for tool in config.tools if tool.kind in TOOLS}
        self._servers = [McpTools(tool) for tool in config.tools if tool.kind == "mcp"]
        self._served: dict[str, McpTools] = {}
        paths = [tool.path for tool in config.tools if tool.kind == "function"]
        self._functions = FunctionTools(paths, config.num_workers, int(config.max_memory_gib * 2**30))
        self._has_functions, self._turn_s = bool(paths), config.turn_s

    async def open(self) -> None:
        """Starts the tools, one after the other."""
        for tool in self._tools.values():
            await tool.open()
        if self._has_functions:
            await self._functions.open()
        for server in self._servers:
            await server.open()
            self._served |= {schema["function"]["name"]: server for schema in server.schemas}
        schemas = [*(tool.schema for tool in self._tools.values()), *self._functions.schemas]
        schemas += [schema for server in self._servers for schema in server.schemas]
        self.offer(schemas)
        versions = [one.version for one in (*self._tools.values(), *self._servers)]
        self.version = "1/" + ",".join([*versions, *([self._functions.version] if self._has_functions else [])])

    def isolate(self, episode_id: str) -> None:
        """Calls the episode's functions in a worker of its own."""
        self._functions.workers.isolate(episode_id)

    def fault(self, episode_id: str) -> EpisodeError | None:
        """Returns whether a function is stuck in its worker, or the worker is lost."""
        return self._functions.workers.fault(episode_id)

    async def reset(self, episode_id: str, seed: int, row: Mapping[str, object]) -> Sequence[Message]:
        """Adds nothing to the row's prompt."""
        if self._has_functions:
            await self._functions.begin(episode_id)
        return ()

    async def call(self, episode_id: str, call: ToolCall, share: float) -> str:
        """Calls a tool. It may take its share of `turn_s`, so that all calls of a turn fit into it."""
        parameters = self._parameters.get(call.name)
        if parameters is None:
            raise BadArgumentsError(f"there is no tool {call.name[:100]!r}: there are {', '.join(self._parameters)}")
        if server := self._served.get(call.name):
            return await server.call(call)
        if fault := find_fault(call.arguments, parameters):
            raise BadArgumentsError(fault)
        arguments = fitted(call.arguments, parameters)
        tool = self._tools.get(call.name)
        if tool is None:
            return await self._functions.call(episode_id, ToolCall(call.name, arguments))
        return await tool.call({name: str(value) for name, value in arguments.items()}, share * self._turn_s)

    async def end(self, episode_id: str) -> None:
        """Frees the episode's place among the workers."""
        if self._has_functions:
            await self._functions.end(episode_id)

    async def close(self) -> None:
        """Ends all tools."""
        await self._functions.close()
        await asyncio.gather(*(server.close() for server in self._servers))
        for tool in self._tools.values():
            await tool.close()
