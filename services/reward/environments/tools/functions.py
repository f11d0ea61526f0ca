"""Calls the user's functions as tools, in worker processes."""

import hashlib
import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from services.common.config.environment import ToolsEnvironmentConfig
from services.reward.environments.base import ToolCall
from services.reward.environments.executor import MAX_REPLY_BYTES
from services.reward.environments.pool import EpisodePool
from services.reward.environments.tools.base import BadArgumentsError, Schema, cut_middle, function_schema
from services.reward.errors import EnvironmentFailure, EpisodeError
from services.reward.processes import child

log = logging.getLogger(__name__)


class FunctionTools:
    """Offers all functions of an environment. An episode stays with one worker, but functions must keep no state."""

    def __init__(self, config: ToolsEnvironmentConfig):
        self.schemas: Sequence[Schema] = ()
        self.paths = [tool.path for tool in config.tools if tool.kind == "function"]
        self.workers = EpisodePool(config, {"path": f"{__name__}:Functions", "kwargs": {"paths": self.paths}})
        self._logged: set[tuple[str, str]] = set()

    @property
    def version(self) -> str:
        return f"functions-{self.workers.version}"

    async def open(self) -> None:
        """Raises EpisodeError if a function cannot be imported, or cannot be a tool."""
        await self.workers.open()
        self.schemas = json.loads(await self.begin("schemas"))
        await self.workers.end("schemas")

    async def begin(self, episode_id: str) -> str:
        """Assigns the episode to a worker, which answers with the schemas."""
        line = await self.workers.begin(episode_id, {"call": "reset", "seed": 0, "row": {}})
        return line["messages"][0]["content"]

    async def call(self, episode_id: str, call: ToolCall) -> str:
        request = json.dumps({"name": call.name, "arguments": call.arguments})
        line = await self.workers.call(episode_id, {"call": "step", "text": request})
        answer = json.loads(line["messages"][0]["content"])
        if "error" in answer:
            name, raised, traceback = call.name, answer["raised"], answer["traceback"]
            if (name, raised) not in self._logged:
                self._logged.add((name, raised))
                text = "tool %s raised %s; the policy is told, and further ones are only counted\n%s"
                log.warning(text, name, raised, traceback)
            raise BadArgumentsError(answer["error"], raised)
        return answer["result"]


Step = tuple[str, float, bool]
_MOST_BYTES = 14  # that a character can take in a reply, which is JSON within JSON
_LINE_BYTES = 1 << 12  # more than the rest of a reply has


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
        """Imports the functions, which may raise anything. The version is the hash of their sources."""
        digests = []
        for path in paths:
            function, module = child.load(path)
            function_schema(function)
            digests.append(child.source_digest(module))
        if len({path.partition(":")[2] for path in paths}) < len(paths):
            raise TypeError(f"two functions have the same name: {', '.join(paths)}")
        cls.version = hashlib.sha256("".join(digests).encode()).hexdigest()[:12]

    def __init__(self, paths: Sequence[str]):
        self._functions: Mapping[str, Callable[..., object]] = {
            path.partition(":")[2]: child.load(path)[0] for path in paths
        }

    def reset(self, seed: int, row: Mapping[str, object]) -> str:
        schemas = []
        for name, function in self._functions.items():
            schema = function_schema(function)
            schemas.append({**schema, "function": {**schema["function"], "name": name}})
        return json.dumps(schemas)

    def step(self, text: str) -> Step | Awaitable[Step]:
        """Calls a function. An async one is awaited by the worker. An EpisodeError or MemoryError ends the episode."""
        call = json.loads(text)
        try:
            result = self._functions[call["name"]](**call["arguments"])
        except (Exception, SystemExit) as error:  # noqa: BLE001 the arguments are the policy's: they can do anything
            return _error(error)
        return _answer_later(result) if inspect.isawaitable(result) else _answer(result)


async def _answer_later(calling: Awaitable[object]) -> Step:
    try:
        result = await calling
    except (Exception, SystemExit) as error:  # noqa: BLE001 as above
        return _error(error)
    return _answer(result)


def _answer(result: object) -> Step:
    try:
        text = _text(result)
    except ValueError as error:  # a number of more digits than Python writes
        return _error(error)
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
        return json.dumps(result, ensure_ascii=False, default=_to_json_value)
    except (TypeError, ValueError, RecursionError):  # keys that are no texts, or an object within itself
        return str(result)


def _to_json_value(value: Any) -> object:
    if hasattr(value, "tolist"):  # numpy's numbers and arrays, and torch's
        return value.tolist()
    if isinstance(value, bytes | bytearray):
        return value.decode(errors="replace")
    if type(value).__str__ is object.__str__ and type(value).__repr__ is object.__repr__:
        detail = f"a function returned what is not JSON and has no text: {type(value).__name__}"
        raise EpisodeError(EnvironmentFailure.INVALID_REPLY, detail)
    return str(value)


def _error(error: BaseException) -> Step:
    """Returns the error for the policy: the text of a ValueError, which functions raise to say something; else, with
    its class.
    """
    if isinstance(error, EpisodeError | MemoryError):
        raise error
    text = str(error) if isinstance(error, ValueError) else ""
    answer = {
        "error": child.explain(text or error),
        "raised": type(error).__name__,
        "traceback": child.traceback_text(error, __file__),
    }
    return json.dumps(answer), 0.0, False
