"""The interfaces of environments and of tools, and the clock of their calls.

Imports nothing heavy, because worker processes load this too.
"""

import asyncio
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass

# Users' environments and tools import these from here.
from services.common.tool_syntax import Schema
from services.common.tool_syntax import ToolCall as ToolCall
from services.reward.errors import EnvironmentFailure as EnvironmentFailure
from services.reward.errors import EpisodeError as EpisodeError


@dataclass(frozen=True)
class Message:
    """A message to add to the conversation. An empty role is raw text, which continues the policy's turn."""

    role: str
    content: str
    name: str = ""


@dataclass(frozen=True)
class Turn:
    text: str
    num_tokens: int
    is_truncated: bool
    is_reasoning: bool = False  # the text begins within reasoning, which the prompt has opened

    def answer(self, tags: Sequence[str]) -> str:
        """Returns the text without what stands between the `tags` of reasoning; all of it if there are none.

        An end without a begin makes all text before it reasoning; a begin without an end, all text after it.
        """
        if not tags:
            return self.text
        begin, end = map(re.escape, tags)
        text = f"{tags[0]}{self.text}" if self.is_reasoning else self.text
        said = re.sub(rf"{begin}.*?(?:{end}|\Z)", "", text, flags=re.DOTALL).rpartition(tags[1])[2]
        return self.text if said == self.text else said.strip()


@dataclass(frozen=True)
class Reply:
    """The answer to a turn: messages, the turn's reward, and whether the episode has ended."""

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    tool_calls: Sequence[ToolCall] = ()
    outcomes: Sequence[str] = ()  # of each call in the text: `ok`, or the kind of error that the policy was told


class Environment:
    """Plays many episodes at the same time; the episode's id tells them apart. Calls of one episode never overlap.

    The service limits each call by `turn_s` (`off_the_clock` says what does not count), closes every episode once, and
    closes the environment at the end. A call that is canceled must leave the environment usable for all other episodes.
    """

    version: str
    """Text that changes whenever the same turn could get another reply."""
    roles: Sequence[str] = ("user",)
    """Roles of the messages that replies may have."""
    tools: Sequence[Mapping[str, object]] = ()
    """JSON schemas of the tools, as chat templates take them."""

    async def open(self) -> None:
        """Starts what the environment needs. Raises EpisodeError if it cannot start."""

    def isolate(self, episode_id: str) -> None:
        """Is called before the reset of an episode that may hang or crash, and must then hurt no other episode."""

    def fault(self, episode_id: str) -> EpisodeError | None:
        """Returns what is known of a call that did not end in its time limit and was canceled; None if it was alone to
        blame and hurt nobody.
        """

    async def reset(self, episode_id: str, seed: int, row: Mapping[str, object]) -> Sequence[Message]:
        """Begins an episode. Returns the messages after the row's own prompt, or raises EpisodeError."""
        raise NotImplementedError

    async def step(self, episode_id: str, turn: Turn) -> Reply:
        """Returns the reply to a turn, or raises EpisodeError."""
        raise NotImplementedError

    async def end(self, episode_id: str) -> None:
        """Frees the episode's resources. The episode may be in any state, also after a failure."""

    async def close(self) -> None:
        """Ends the environment; calls in progress fail as CRASHED."""


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
    """Answers calls of the policy, many at the same time."""

    schema: Schema
    version: str
    """Text that changes whenever the same call could get another result."""

    async def open(self) -> None:
        """Starts what the tool needs. Raises EpisodeError if it cannot start."""

    async def call(self, arguments: Mapping[str, str], limit_s: float) -> str:
        """Returns the result of a call, whose arguments fit the schema. Raises BadArgumentsError if there is none."""
        raise NotImplementedError

    async def close(self) -> None:
        pass


def tool_schema(name: str, description: str, parameters: Schema) -> Schema:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def text_tool_schema(name: str, description: str, argument: str, meaning: str) -> Schema:
    properties = {argument: {"type": "string", "description": meaning}}
    return tool_schema(name, description, {"type": "object", "properties": properties, "required": [argument]})


class Clock:
    """Expires when it has run for `limit_s` seconds in total. It begins to run at once, and can be stopped."""

    def __init__(self, limit_s: float):
        self._loop = asyncio.get_running_loop()
        self.expired: asyncio.Future[None] = self._loop.create_future()
        self._left_s, self._num_stops = limit_s, 0
        self._run()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stops the clock during the block, also for anything else that the call does meanwhile."""
        self._num_stops += 1
        if self._num_stops == 1:
            self._timer.cancel()
            self._left_s -= time.monotonic() - self._began
        try:
            yield
        finally:
            self._num_stops -= 1
            if not self._num_stops:
                self._run()

    def close(self) -> None:
        self._num_stops += 1  # a block that stopped the clock may still end
        self._timer.cancel()

    def _run(self) -> None:
        self._began = time.monotonic()
        self._timer = self._loop.call_later(self._left_s, self._expire)

    def _expire(self) -> None:
        if not self.expired.done():
            self.expired.set_result(None)


CLOCK: ContextVar[Clock] = ContextVar("clock")
"""Clock of the call that the current task belongs to."""


@contextmanager
def off_the_clock() -> Iterator[None]:
    """Does not count the time of the block toward `turn_s`. The block must have a time limit of its own.

    The episode's limit (`episode_s`) applies in any case. Outside of an episode this does nothing.
    """
    clock = CLOCK.get(None)
    with clock.stopped() if clock else nullcontext():
        yield
