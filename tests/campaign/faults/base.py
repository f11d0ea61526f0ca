"""What every fault has."""

import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.campaign.cluster import Cluster, Process

Undo = Callable[[], Awaitable[None] | None]
PROCESSES = ("coordinator", "trainer", "rank-1", "rollout-0", "rollout-1", "engine-0", "engine-1", "reward")
SERVED = ("trainer", "reward", "rollout-0", "rollout-1")


@dataclass
class Scene:
    """Where a fault happens."""

    cluster: Cluster
    coordinator: Process
    run_dir: Path
    number: random.Random
    start_rival: Callable[..., Awaitable[Process]]
    disk: Any = None
    answer: str = "go"
    """What the process at the gate is told."""
    undos: list[tuple[float, Undo]] = field(default_factory=list)
    """How long after the injection each is called; at the end of the session at the latest."""
    notes: dict[str, Any] = field(default_factory=dict)

    def pid_of(self, victim: str) -> int | None:
        if victim == "coordinator":
            return self.coordinator.pid if self.coordinator.code is None else None
        return self.cluster.pid_of(victim)


@dataclass(frozen=True)
class Fault:
    """A kind of fault, and whom it can happen to."""

    name: str
    victims: tuple[str, ...]
    inject: Callable[[Scene, str], Awaitable[None]]
    disk: Callable[..., AbstractContextManager[Any]] | None = None
    """Mounts the disk that the run's directory is on, if the fault needs one of its own."""
