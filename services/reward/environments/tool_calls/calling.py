"""Plays episodes in which the policy calls tools, which a derived class provides."""

import asyncio
from collections.abc import Mapping, Sequence

from services.common.config.environment import ToolSyntax
from services.reward.environments.base import (
    Environment,
    EnvironmentFailure,
    EpisodeError,
    Message,
    Reply,
    ToolCall,
    Turn,
)
from services.reward.environments.tool_calls.schema import Schema, only_text_argument
from services.reward.environments.tool_calls.syntax import BadCall, Call, find_calls
from services.reward.environments.toolbox.base import BadArgumentsError


class CallingEnvironment(Environment):
    """Calls the tools of a turn at the same time and returns the results in order. A turn without calls is the last."""

    def __init__(self, config: ToolSyntax):
        self._syntax, self._result_tag = config.syntax, config.result_tag
        self.roles = () if config.result_tag else ("tool",)
        self._arguments: dict[str, str] = {}

    async def call(self, episode_id: str, call: ToolCall, share: float) -> str:
        """Returns the result of a call, which may use this `share` of the turn's time.

        Raises:
            BadArgumentsError: There is no such tool, or no result for these arguments. The policy gets the text.
            EpisodeError: The tool failed.
        """
        raise NotImplementedError

    def offer(self, schemas: Sequence[Schema]) -> None:
        """Sets the tools that the policy can call. With syntax tags, the prompt must describe them.

        Raises:
            EpisodeError: With syntax tags, a tool does not take one text argument; or two have the same name.
        """
        names = [schema["function"]["name"] for schema in schemas]
        if len(set(names)) < len(names):
            raise _cannot(f"two tools have the same name: {', '.join(names)}")
        if self._syntax != "tags":
            self.tools = tuple(schemas)
            return
        for name, schema in zip(names, schemas, strict=True):
            argument = only_text_argument(schema)
            if argument is None:
                raise _cannot(f"tool {name} needs one argument, a text, to be called with syntax tags")
            self._arguments[name] = argument

    async def reset(self, episode_id: str, seed: int, row: Mapping[str, object]) -> Sequence[Message]:
        """Adds nothing to the row's prompt."""
        return ()

    async def step(self, episode_id: str, turn: Turn) -> Reply:
        """Calls the tools that the policy asks for."""
        calls = find_calls(self._syntax, turn.text, self._arguments)
        asked = [asyncio.create_task(self._answer(episode_id, call, 1 / len(calls))) for call in calls]
        try:
            messages = await asyncio.gather(*asked)
        finally:
            for call in asked:
                call.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        return Reply(messages, done=not calls, tool_calls=[call for call in calls if isinstance(call, ToolCall)])

    async def _answer(self, episode_id: str, call: Call, share: float) -> Message:
        if isinstance(call, BadCall):
            return self._message(call.name, f"error: {call.detail}")
        try:
            return self._message(call.name, await self.call(episode_id, call, share))
        except BadArgumentsError as error:
            return self._message(call.name, f"error: {error}")

    def _message(self, name: str, text: str) -> Message:
        # JSON of the policy, or a page that a tool has found, may hold half of a surrogate pair.
        name, text = (part.encode(errors="replace").decode() for part in (name, text))
        if self._result_tag:
            return Message("", f"\n\n<{self._result_tag}>{text}</{self._result_tag}>\n\n")
        return Message("tool", text, name)


def _cannot(detail: str) -> EpisodeError:
    return EpisodeError(EnvironmentFailure.REFUSED, detail)
