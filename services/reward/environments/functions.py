"""Calls the user's functions as tools, in worker processes, and makes their schemas."""

import hashlib
import inspect
import json
import logging
import re
import textwrap
import types
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from services.common.config.environment import ToolsEnvironmentConfig
from services.common.json_values import JsonObject
from services.common.tool_syntax import Schema, fits
from services.reward.environments.base import BadArgumentsError, ToolCall, cut_middle, tool_schema
from services.reward.environments.executor import MAX_REPLY_BYTES, EpisodeExecutor, in_thread, make_threads_small
from services.reward.environments.workers import EpisodePool
from services.reward.errors import EnvironmentFailure, EpisodeError
from services.reward.processes import child
from services.reward.processes.child import Reply

log = logging.getLogger(__name__)


class FunctionTools:
    """Offers all functions of an environment. An episode stays with one worker, but functions must keep no state."""

    def __init__(self, config: ToolsEnvironmentConfig):
        self.paths = [tool.path for tool in config.tools if tool.kind == "function"]
        self.workers = EpisodePool(config, {"paths": self.paths}, f"{__name__}:FunctionsExecutor")
        self._logged: set[tuple[str, str]] = set()

    async def begin(self, episode_id: str) -> None:
        await self.workers.begin(episode_id, {"call": "begin"})

    async def call(self, episode_id: str, call: ToolCall) -> str:
        request = {"call": "call", "name": call.name, "arguments": call.arguments}
        answer = await self.workers.call(episode_id, request)
        if "error" in answer:
            name, raised, traceback = call.name, answer["raised"], answer["traceback"]
            if (name, raised) not in self._logged:
                self._logged.add((name, raised))
                text = "tool %s raised %s; the policy is told, and further ones are only counted\n%s"
                log.warning(text, name, raised, traceback)
            raise BadArgumentsError(answer["error"], raised)
        return answer["result"]


_NUM_THREADS = 32  # of an episode: calls of a turn may run at the same time
_MOST_BYTES = 12  # that a character takes in JSON
_RESULT_BYTES = MAX_REPLY_BYTES - (1 << 12)  # of a reply, whose other parts are short


class FunctionsExecutor(EpisodeExecutor):
    """Calls functions. What a function raises is an answer too.

    -> {"call": "call", "episode": "e", "name": "weather", "arguments": {"city": "Oslo"}}
    <- {"result": "rain"}   or   {"error": "no such city", "raised": "ValueError", "traceback": "..."}
    """

    def __init__(self, paths: Sequence[str]):
        make_threads_small()
        loaded = {path.partition(":")[2]: child.load(path) for path in paths}
        if len(loaded) < len(paths):
            raise TypeError(f"two functions have the same name: {', '.join(paths)}")
        self._functions = {name: function for name, (function, _) in loaded.items()}
        digests = "".join(child.source_digest(module) for _, module in loaded.values())
        self.version = hashlib.sha256(digests.encode()).hexdigest()[:12]
        schemas = [(name, function_schema(function)) for name, function in self._functions.items()]
        self.facts = {"schemas": [{**one, "function": {**one["function"], "name": name}} for name, one in schemas]}
        self._threads: dict[str, ThreadPoolExecutor] = {}

    async def execute(self, call: Reply) -> Reply:
        episode = call["episode"]
        if call["call"] == "call":
            return await in_thread(self._threads[episode], "tool", self._call, call["name"], call["arguments"])
        if call["call"] == "begin":
            self._threads[episode] = ThreadPoolExecutor(_NUM_THREADS)
        elif threads := self._threads.pop(episode, None):
            threads.shutdown(wait=False)
        return {}

    def _call(self, name: str, arguments: Mapping[str, object]) -> Reply | Awaitable[Reply]:
        """Calls a function. An async one is awaited by the worker. An EpisodeError or MemoryError ends the episode."""
        try:
            result = self._functions[name](**arguments)
        except (Exception, SystemExit) as error:  # noqa: BLE001 the arguments are the policy's: they can do anything
            return _error(error)
        return _answer_later(result) if inspect.isawaitable(result) else _answer(result)


async def _answer_later(calling: Awaitable[object]) -> Reply:
    try:
        result = await calling
    except (Exception, SystemExit) as error:  # noqa: BLE001 as above
        return _error(error)
    return _answer(result)


def _answer(result: object) -> Reply:
    try:
        text = _text(result)
    except ValueError as error:  # a number of more digits than Python writes
        return _error(error)
    if len(text) > _RESULT_BYTES or len(json.dumps(text)) > _RESULT_BYTES:
        text = cut_middle(text, _RESULT_BYTES // _MOST_BYTES)
    return {"result": text}


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


def _error(error: BaseException) -> Reply:
    """Returns the error for the policy: the text of a ValueError, which functions raise to say something; else, with
    its class.
    """
    if isinstance(error, EpisodeError | MemoryError):
        raise error
    text = str(error) if isinstance(error, ValueError) else ""
    return {
        "error": child.explain(text or error),
        "raised": type(error).__name__,
        "traceback": child.traceback_text(error, __file__),
    }


_TYPES: Mapping[object, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    dict: "object",
    list: "array",
}


def function_schema(function: Callable[..., object]) -> Schema:
    """Returns the schema of a function, from its signature and docstring (Google style).

    Raises TypeError if it takes arguments that have no name, or of a type that JSON cannot hold.
    """
    hints = typing.get_type_hints(function, include_extras=True)
    summary, meanings = _read_docstring(inspect.getdoc(function) or "")
    properties: dict[str, object] = {}
    required = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{parameter} of {function.__name__}: a tool's arguments must be given by name")
        hint = hints.get(parameter.name, Any)
        try:
            schema = _type_schema(hint)
        except TypeError as error:
            raise TypeError(f"{parameter.name} of {function.__name__}: {error}") from None
        if parameter.default is None and schema and not fits(None, schema):
            schema = {"anyOf": [schema, {"type": "null"}]}
        annotations = typing.get_args(hint)[1:] if typing.get_origin(hint) is typing.Annotated else ()
        meaning = meanings.get(parameter.name) or next((one for one in annotations if isinstance(one, str)), None)
        properties[parameter.name] = {**schema, "description": meaning} if meaning else schema
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return tool_schema(function.__name__, summary, parameters)


def _type_schema(hint: Any) -> JsonObject:
    if hint is Any:
        return {}
    if hint is type(None):
        return {"type": "null"}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:  # first, because its metadata may have no hash
        return _type_schema(arguments[0])
    plain = origin if origin and not arguments else hint  # List and Dict of typing without types
    if plain in _TYPES:
        return {"type": _TYPES[plain]}
    if origin is Literal:
        (kind, *others) = {type(value) for value in arguments}
        return {**(_type_schema(kind) if not others else {}), "enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_type_schema(argument) for argument in arguments]}
    if origin is list:
        return {"type": "array", "items": _type_schema(arguments[0])}
    if origin is dict and arguments[0] is str:
        return {"type": "object", "additionalProperties": _type_schema(arguments[1])}
    raise TypeError(f"{hint}: a tool's argument must be of a type of JSON")


def _read_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """Returns the text before the sections, and the meaning of each argument."""
    head, _, arguments = f"\n{docstring}".partition("\nArgs:\n")
    if not head and not arguments.startswith(" "):  # inspect.getdoc takes the indentation after a first line away
        arguments = textwrap.indent(arguments, " ")
    summary = re.split(r"\n(?:Returns|Raises|Yields|Examples?):\n", head)[0].strip()
    meanings: dict[str, str] = {}
    name, indent = "", 0
    for line in arguments.splitlines():
        if line.strip() and not line.startswith(" "):
            break  # the next section
        depth = len(line) - len(line.lstrip())
        entry = re.match(r"\s+(\w+)\s*(?:\([^)]*\))?:\s*(.*)", line)
        if entry and (not meanings or depth <= indent):
            name, indent = entry[1], depth
            meanings[name] = entry[2]
        elif name:
            meanings[name] = f"{meanings[name]} {line.strip()}".strip()
    return summary, meanings
