"""Runs agents that are functions of the user, in worker processes that can be killed."""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from services.common.config.environment import AgentEnvironmentConfig
from services.common.import_path import require_takes
from services.reward.agents.base import CalledRunner, Part
from services.reward.environments.executor import EpisodeExecutor, in_thread, invalid_reply
from services.reward.environments.pool import EpisodePool
from services.reward.processes import child
from services.reward.processes.child import Reply


class FunctionExecutor(EpisodeExecutor):
    """Calls the function `path` once for each episode: {"call": "play", "episode": ..., "fields": {...}}."""

    def __init__(self, path: str):
        self._function, module = child.load(path)
        require_takes(self._function, path, (), dict.fromkeys(("row", "seed", "url", "key")))
        self.version = child.source_digest(module)

    async def execute(self, call: Reply) -> Reply:
        if call["call"] != "play":
            return {}
        text = await _call(self._function, call["fields"])
        if text is not None and not isinstance(text, str):
            raise invalid_reply(f"the agent returned {text!r:.200}: return its final text, or None")
        return {"text": text or ""}


async def _call(function: Callable[..., object], fields: Mapping[str, object]) -> object:
    """Calls a function on the event loop if it is async, else in a thread of its own."""
    if inspect.iscoroutinefunction(function):
        return await function(**fields)
    thread = ThreadPoolExecutor(1)
    try:
        return await in_thread(thread, "function", function, **fields)
    finally:
        thread.shutdown(wait=False)


class FunctionRunner(CalledRunner):
    """Runs `environment.path`."""

    def __init__(self, config: AgentEnvironmentConfig):
        super().__init__()
        self._workers = EpisodePool(config, {"path": config.path}, f"{__name__}:FunctionExecutor")

    async def open(self) -> None:
        await self._workers.open()
        self.version = self._workers.version

    def isolate(self, episode_id: str) -> None:
        self._workers.isolate(episode_id)

    async def call(self, part: Part) -> str:
        fields = {"row": part.row, "seed": part.seed, "url": part.url, "key": part.key}
        try:
            return (await self._workers.begin(part.episode_id, {"call": "play", "fields": fields}))["text"]
        finally:
            await asyncio.shield(self._workers.end(part.episode_id))

    async def close(self) -> None:
        await self._workers.close()
