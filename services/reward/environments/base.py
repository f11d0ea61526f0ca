"""Defines the interface of environments. Imports nothing heavy, because worker processes load this too."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# Users' environments and tools raise these, and import them from here.
from services.reward.errors import EnvironmentFailure as EnvironmentFailure
from services.reward.errors import EpisodeError as EpisodeError


@dataclass(frozen=True)
class Message:
    """Holds one message to add to the conversation. An empty role is raw text, which continues the policy's turn."""

    role: str
    content: str
    name: str = ""


@dataclass(frozen=True)
class ToolCall:
    """Holds a call of a tool by its name."""

    name: str
    arguments: Mapping[str, object]


@dataclass(frozen=True)
class Turn:
    """Holds one turn of the policy."""

    text: str
    num_tokens: int
    is_truncated: bool
    is_reasoning: bool = False
    """Whether the text begins within reasoning, which the prompt has opened."""

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
    """Holds the answer to a turn: messages, the turn's reward, and whether the episode has ended."""

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    tool_calls: Sequence[ToolCall] = field(default=())
    outcomes: Sequence[str] = field(default=())
    """What became of each call that was found: `ok`, or the kind of error that the policy was told."""


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
        """Starts what the environment needs.

        Raises:
            EpisodeError: It cannot start.
        """

    def isolate(self, episode_id: str) -> None:
        """Is called before the reset of an episode that may hang or crash, and must then hurt no other episode."""

    def fault(self, episode_id: str) -> EpisodeError | None:
        """Returns what is known of a call that did not end in its time limit and was canceled; None if it was alone to
        blame and hurt nobody.
        """

    async def reset(self, episode_id: str, seed: int, row: Mapping[str, object]) -> Sequence[Message]:
        """Begins an episode. Returns the messages after the row's own prompt.

        Raises:
            EpisodeError: The episode cannot begin.
        """
        raise NotImplementedError

    async def step(self, episode_id: str, turn: Turn) -> Reply:
        """Returns the reply to a turn.

        Raises:
            EpisodeError: The environment failed.
        """
        raise NotImplementedError

    async def end(self, episode_id: str) -> None:
        """Frees the episode's resources. The episode may be in any state, also after a failure."""

    async def close(self) -> None:
        """Ends the environment; calls in progress fail as CRASHED."""
