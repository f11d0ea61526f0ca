"""The interface of what runs agents."""

import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Played:
    """What an agent left behind."""

    exit_code: int
    text: str
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """One episode for an agent: the row, and where it reaches the model."""

    episode_id: str
    seed: int
    row: Mapping[str, object]
    key: str
    serve: Callable[[socket.socket], Awaitable[None]]
    """Answers the calls of this episode, and of no other, at a socket that listens."""
    port: int
    """The port on the host's loopback that leads to the episode of `key`."""


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
