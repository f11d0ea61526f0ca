"""Plays episodes with a class in worker processes: the user's, or one of ours for a library of environments."""

from collections.abc import Mapping, Sequence

from services.common.config.environment import (
    PythonEnvironmentConfig,
    ReasoningGymEnvironmentConfig,
    TextArenaEnvironmentConfig,
    WorkerEnvironmentConfig,
)
from services.reward.environments.base import Environment, Message, Reply, Turn
from services.reward.environments.pool import EpisodePool
from services.reward.errors import EpisodeError

_LIBRARIES = "services.reward.environments.libraries"


class WorkerEnvironment(Environment):
    """Plays each episode with an object of `path`, a `module:Class`, made from `kwargs`.

    With `reasoning_tags`, it gets the turns without their reasoning.
    """

    def __init__(
        self,
        path: str,
        kwargs: Mapping[str, object],
        config: WorkerEnvironmentConfig,
        reasoning_tags: Sequence[str] = (),
    ):
        self._reasoning_tags = reasoning_tags
        self._workers = EpisodePool(config, {"path": path, "kwargs": kwargs})

    async def open(self) -> None:
        await self._workers.open()
        self.version, self.roles = f"1/{self._workers.version}", self._workers.facts["roles"]

    def isolate(self, episode_id: str) -> None:
        self._workers.isolate(episode_id)

    def fault(self, episode_id: str) -> EpisodeError | None:
        return self._workers.fault(episode_id)

    async def reset(self, episode_id: str, seed: int, row: Mapping[str, object]) -> Sequence[Message]:
        line = await self._workers.begin(episode_id, {"call": "reset", "seed": seed, "row": row})
        return [Message(**message) for message in line["messages"]]

    async def step(self, episode_id: str, turn: Turn) -> Reply:
        line = await self._workers.call(episode_id, {"call": "step", "text": turn.answer(self._reasoning_tags)})
        return Reply([Message(**message) for message in line["messages"]], line["reward"], line["done"])

    async def end(self, episode_id: str) -> None:
        await self._workers.end(episode_id)

    async def close(self) -> None:
        await self._workers.close()


def python(config: PythonEnvironmentConfig) -> Environment:
    return WorkerEnvironment(config.path, config.kwargs, config)


def textarena(config: TextArenaEnvironmentConfig) -> Environment:
    kwargs = {"game": config.game, "kwargs": config.kwargs}
    return WorkerEnvironment(f"{_LIBRARIES}:Game", kwargs, config, config.reasoning_tags)


def reasoning_gym(config: ReasoningGymEnvironmentConfig) -> Environment:
    kwargs = {"task": config.task, "kwargs": config.kwargs}
    return WorkerEnvironment(f"{_LIBRARIES}:Task", kwargs, config, config.reasoning_tags)
