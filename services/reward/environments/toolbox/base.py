"""Defines the interface of tools."""

from collections.abc import Mapping

from services.reward.environments.tool_calls.schema import Schema


class BadArgumentsError(Exception):
    """The policy called a tool wrongly. The text is its observation."""


class Tool:
    """Answers calls, many at the same time."""

    schema: Schema
    version: str
    """Text that changes whenever the same call could get another result."""

    async def open(self) -> None:
        """Starts what the tool needs.

        Raises:
            EpisodeError: It cannot start.
        """

    async def call(self, arguments: Mapping[str, str], limit_s: float) -> str:
        """Returns the result of a call, whose arguments fit the schema. It may compute for `limit_s` seconds.

        Raises:
            BadArgumentsError: The arguments have no result.
            EpisodeError: The tool failed.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Ends the tool's processes and connections."""
