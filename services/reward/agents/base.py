"""The interface of what runs agents."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from services.reward.sandboxed.agent import ENDED


@dataclass(frozen=True)
class Played:
    """What an agent left behind."""

    exit_code: int
    text: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    errors: str = ""
    """The end of a command's standard error."""


@dataclass(frozen=True)
class Part:
    """One episode for an agent: the row, and where it reaches the model."""

    episode_id: str
    seed: int
    row: Mapping[str, object]
    key: str
    serve: Callable[[socket.socket], Awaitable[None]]
    """Answers the calls of this episode, and of no other, at a socket that listens."""
    url: str
    """Where the host's loopback or the network leads to the episode of `key`; empty for agents with such a socket."""


class Runner:
    """Runs agents of one config, many at the same time."""

    version: str
    """Text that changes whenever the agent could behave otherwise."""

    async def open(self) -> None:
        """Starts what agents need. Raises EpisodeError if it cannot start."""

    def isolate(self, episode_id: str) -> None:
        """Is called before an episode that may hang or crash, and must then hurt no other episode."""

    async def run(self, part: Part) -> Played:
        """Runs the agent until it ends. Raises EpisodeError if it fails. None of it is left when this is canceled."""
        raise NotImplementedError

    def end(self, episode_id: str) -> None:
        """Makes the agent of an episode end now; `run` then returns what it has left behind."""
        raise NotImplementedError

    async def close(self) -> None:
        """Ends all agents."""


class CalledRunner(Runner):
    """Runs agents that are called once for each episode, and answer with their final text."""

    def __init__(self) -> None:
        self._running: dict[str, asyncio.Task[str]] = {}

    async def call(self, part: Part) -> str:
        """Returns the final text. Is canceled if the episode ends before. Raises EpisodeError if the agent fails."""
        raise NotImplementedError

    async def run(self, part: Part) -> Played:
        call = self._running[part.episode_id] = asyncio.create_task(self.call(part))
        try:
            await asyncio.wait({call})
            return Played(ENDED, "") if call.cancelled() else Played(0, call.result())
        finally:
            del self._running[part.episode_id]
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    def end(self, episode_id: str) -> None:
        if call := self._running.get(episode_id):
            call.cancel()
