"""Defines the interface of tools."""

from collections.abc import Mapping

from services.reward.environments.tool_calls.schema import Schema


class BadArgumentsError(Exception):
    """The policy called a tool wrongly. The text is its observation, and `outcome` is what metrics call it."""

    def __init__(self, text: str, outcome: str = "refused"):
        super().__init__(text)
        self.outcome = outcome


def cut_middle(text: str, max_chars: int) -> str:
    """Returns `text`; the first and last characters and a mark between them, if there are more than `max_chars`."""
    half = max_chars // 2
    return text if len(text) <= 2 * half else f"{text[:half]}\n[... cut ...]\n{text[len(text) - half :]}"


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
