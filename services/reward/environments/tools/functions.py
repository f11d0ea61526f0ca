"""Calls the user's functions as tools, in worker processes."""

import hashlib
import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from services.reward.environments.base import ToolCall
from services.reward.environments.tools.base import BadArgumentsError, Schema, cut_middle, function_schema
from services.reward.environments.worker import MAX_REPLY_BYTES
from services.reward.environments.workers import Target, Workers
from services.reward.errors import EnvironmentFailure, EpisodeError
from services.reward.processes import child_setup

log = logging.getLogger(__name__)

_ASKING = "schemas"


class FunctionTools:
    """Offers all functions of an environment. An episode stays with one worker, but functions must keep no state."""

    def __init__(self, paths: Sequence[str], num_workers: int, max_memory_bytes: int):
        self.schemas: Sequence[Schema] = ()
        target = Target("services.reward.environments.tools.functions:Functions", {"paths": paths}, max_memory_bytes)
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


Step = tuple[str, float, bool]
_MOST_BYTES = 14
"""Number of bytes that a character can take in a reply, which is JSON within JSON."""
_LINE_BYTES = 1 << 12
"""Number of bytes that is more than the rest of a reply has."""


class Functions:
    """Returns the functions' schemas, then answers calls. What a function raises is an answer too.

    reset() -> '[{"type": "function", ...}, ...]'
    step('{"name": "weather", "arguments": {"city": "Oslo"}}') -> '{"result": "rain"}' or
        '{"error": "no such city", "raised": "ValueError", "traceback": "..."}'
    """

    version = ""
    num_threads = 32
    """Calls of a turn may run at the same time."""

    @classmethod
    def prepare(cls, paths: Sequence[str]) -> None:
        """Imports the functions. The version is the hash of their sources.

        Raises:
            TypeError: One cannot be a tool, or two have the same name. Importing may raise anything.
        """
        digests = []
        for path in paths:
            function, module = child_setup.load(path)
            function_schema(function)
            digests.append(child_setup.source_digest(module))
        if len({path.partition(":")[2] for path in paths}) < len(paths):
            raise TypeError(f"two functions have the same name: {', '.join(paths)}")
        cls.version = hashlib.sha256("".join(digests).encode()).hexdigest()[:12]

    def __init__(self, paths: Sequence[str]):
        self._functions: Mapping[str, Callable[..., Any]] = {
            path.partition(":")[2]: child_setup.load(path)[0] for path in paths
        }

    def reset(self, seed: int, row: Mapping[str, object]) -> str:
        """Returns the schemas."""
        schemas = []
        for name, function in self._functions.items():
            schema = function_schema(function)
            schemas.append({**schema, "function": {**schema["function"], "name": name}})
        return json.dumps(schemas)

    def step(self, text: str) -> Step | Awaitable[Step]:
        """Calls a function. An async one is awaited by the worker.

        Raises:
            EpisodeError: The function raised it, or returned an object that has no text.
            MemoryError: The function raised it.
        """
        call = json.loads(text)
        try:
            result = self._functions[call["name"]](**call["arguments"])
        except (EpisodeError, MemoryError):  # these end the episode
            raise
        except Exception as error:  # noqa: BLE001 the arguments are the policy's, and can make it raise anything
            return _error(error)
        return _answer_later(result) if inspect.isawaitable(result) else _answer(result)


async def _answer_later(calling: Awaitable[object]) -> Step:
    try:
        result = await calling
    except (EpisodeError, MemoryError):  # these end the episode
        raise
    except Exception as error:  # noqa: BLE001 the arguments are the policy's, and can make it raise anything
        return _error(error)
    return _answer(result)


def _answer(result: object) -> Step:
    text = _text(result)
    if _MOST_BYTES * len(text) > MAX_REPLY_BYTES - _LINE_BYTES:
        whole = json.dumps(json.dumps({"result": text[:MAX_REPLY_BYTES]}))
        if len(text) > MAX_REPLY_BYTES or len(whole) > MAX_REPLY_BYTES - _LINE_BYTES:
            text = cut_middle(text, (MAX_REPLY_BYTES - _LINE_BYTES) // _MOST_BYTES)
    return json.dumps({"result": text}), 0.0, False


def _text(result: object) -> str:
    """Returns a text or bytes as they are, all else as JSON, and what JSON cannot hold as Python writes it."""
    if isinstance(result, str):
        return result
    if isinstance(result, bytes | bytearray):
        return result.decode(errors="replace")
    try:
        return json.dumps(result, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError):  # keys that are no texts, or an object within itself
        return str(result)


def _plain(value: Any) -> object:
    """Returns a value as JSON can hold it.

    Raises:
        EpisodeError: It has no text but its address in memory, which differs in every process.
    """
    if hasattr(value, "tolist"):  # numpy's numbers and arrays, and torch's
        return value.tolist()
    if isinstance(value, bytes | bytearray):
        return value.decode(errors="replace")
    if type(value).__str__ is object.__str__ and type(value).__repr__ is object.__repr__:
        detail = f"a function returned what is not JSON and has no text: {type(value).__name__}"
        raise EpisodeError(EnvironmentFailure.INVALID_REPLY, detail)
    return str(value)


def _error(error: Exception) -> Step:
    """Returns the error for the policy: the text of a ValueError, which functions raise to say something; else, with
    its class.
    """
    text = str(error) if isinstance(error, ValueError) else ""
    answer = {
        "error": child_setup.explain(text or error),
        "raised": type(error).__name__,
        "traceback": child_setup.traceback_text(error, __file__),
    }
    return json.dumps(answer), 0.0, False
