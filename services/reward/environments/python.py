"""Plays episodes with a class in worker processes: the user's, or one of ours for a library of environments."""

from collections.abc import Mapping, Sequence

from services.common.config.environment import (
    PythonEnvironmentConfig,
    ReasoningGymEnvironmentConfig,
    TextArenaEnvironmentConfig,
)
from services.reward.environments.base import Environment, Message, Reply, Turn
from services.reward.environments.workers import Target, Workers
from services.reward.errors import EnvironmentFailure, EpisodeError
from services.reward.processes.child import Reply as Line

Config = PythonEnvironmentConfig | TextArenaEnvironmentConfig | ReasoningGymEnvironmentConfig
_LIBRARIES = "services.reward.environments.libraries"


class WorkerEnvironment(Environment):
    """Plays each episode with an object of `path`, a `module:Class`, made from `kwargs`.

    With `reasoning_tags`, it gets the turns without their reasoning.
    """

    def __init__(self, path: str, kwargs: Mapping[str, object], config: Config, reasoning_tags: Sequence[str] = ()):
        self._reasoning_tags = reasoning_tags
        target = Target(path, kwargs, int(config.max_memory_gib * 2**30))
        self._workers = Workers(target, config.num_workers)

    async def open(self) -> None:
        """Starts the workers."""
        await self._workers.open()
        self.version, self.roles = f"1/{self._workers.version}", self._workers.roles

    def isolate(self, episode_id: str) -> None:
        """Gives the episode a worker of its own."""
        self._workers.isolate(episode_id)

    def fault(self, episode_id: str) -> EpisodeError | None:
        """Returns whether the call is stuck in its worker, or the worker is lost."""
        return self._workers.fault(episode_id)

    async def reset(self, episode_id: str, seed: int, row: Mapping[str, object]) -> Sequence[Message]:
        """Makes the object and calls its reset."""
        return _messages(await self._workers.begin(episode_id, {"call": "reset", "seed": seed, "row": row}))

    async def step(self, episode_id: str, turn: Turn) -> Reply:
        """Calls step with the policy's text."""
        line = await self._workers.call(episode_id, {"call": "step", "text": turn.answer(self._reasoning_tags)})
        try:
            return Reply(_messages(line), line["reward"], line["done"])
        except KeyError as error:
            raise EpisodeError(EnvironmentFailure.INVALID_REPLY, f"the worker's reply has no {error}") from error

    async def end(self, episode_id: str) -> None:
        """Calls close, if the object has it, and drops the object."""
        await self._workers.end(episode_id)

    async def close(self) -> None:
        """Kills the workers."""
        await self._workers.close()


def python(config: PythonEnvironmentConfig) -> Environment:
    """Returns the environment that the user's class plays."""
    return WorkerEnvironment(config.path, config.kwargs, config)


def textarena(config: TextArenaEnvironmentConfig) -> Environment:
    """Returns the environment that a game of textarena plays."""
    kwargs = {"game": config.game, "kwargs": config.kwargs}
    return WorkerEnvironment(f"{_LIBRARIES}:Game", kwargs, config, config.reasoning_tags)


def reasoning_gym(config: ReasoningGymEnvironmentConfig) -> Environment:
    """Returns the environment that gives tasks of reasoning-gym."""
    kwargs = {"task": config.task, "kwargs": config.kwargs}
    return WorkerEnvironment(f"{_LIBRARIES}:Task", kwargs, config, config.reasoning_tags)


def _messages(line: Line) -> list[Message]:
    try:
        return [Message(m["role"], m["content"], m.get("name", "")) for m in line["messages"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise EpisodeError(EnvironmentFailure.INVALID_REPLY, f"the worker's reply has no messages: {error}") from error
