"""Calls the user's functions in worker processes."""

import json
import logging
from collections.abc import Sequence

from services.reward.environments.base import ToolCall
from services.reward.environments.tool_calls.schema import Schema
from services.reward.environments.toolbox.base import BadArgumentsError
from services.reward.environments.workers import Target, Workers

log = logging.getLogger(__name__)

_ASKING = "schemas"


class FunctionTools:
    """Offers all functions of an environment. An episode stays with one worker, but functions must keep no state."""

    def __init__(self, paths: Sequence[str], num_workers: int, max_memory_bytes: int):
        self.schemas: Sequence[Schema] = ()
        target = Target("services.reward.environments.hosted.functions:Functions", {"paths": paths}, max_memory_bytes)
        self.workers = Workers(target, num_workers)
        """The processes."""
        self._logged: set[tuple[str, str]] = set()

    @property
    def version(self) -> str:
        """Returns the hash of the functions' sources."""
        return f"functions-{self.workers.version}"

    async def open(self) -> None:
        """Starts the workers and asks for the schemas.

        Raises:
            EpisodeError: A function cannot be imported, or cannot be a tool.
        """
        await self.workers.open()
        self.schemas = json.loads(await self._begin(_ASKING))
        await self.workers.end(_ASKING)

    async def begin(self, episode_id: str) -> None:
        """Assigns the episode to a worker.

        Raises:
            EpisodeError: None can be started.
        """
        await self._begin(episode_id)

    async def call(self, episode_id: str, call: ToolCall) -> str:
        """Returns the result of a call, whose arguments fit the schema.

        Raises:
            BadArgumentsError: The function raised an exception. The log has the traceback of the first of each class.
            EpisodeError: It raised this itself, ran out of memory, or its worker died.
        """
        request = json.dumps({"name": call.name, "arguments": call.arguments})
        line = await self.workers.call(episode_id, {"call": "step", "text": request})
        answer = json.loads(line["messages"][0]["content"])
        if "error" in answer:
            self._log_once(call.name, answer["raised"], answer["traceback"])
            raise BadArgumentsError(answer["error"], answer["raised"])
        return answer["result"]

    async def end(self, episode_id: str) -> None:
        """Frees the episode's place."""
        await self.workers.end(episode_id)

    async def close(self) -> None:
        """Kills the workers."""
        await self.workers.close()

    def _log_once(self, name: str, raised: str, traceback: str) -> None:
        if (name, raised) not in self._logged:
            self._logged.add((name, raised))
            log.warning(
                "tool %s raised %s; the policy is told, and further ones are only counted\n%s", name, raised, traceback
            )

    async def _begin(self, episode_id: str) -> str:
        line = await self.workers.begin(episode_id, {"call": "reset", "seed": 0, "row": {}})
        return line["messages"][0]["content"]
