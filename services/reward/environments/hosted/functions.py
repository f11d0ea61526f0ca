"""Calls the user's functions in a worker process."""

import hashlib
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from services.reward.environments.base import EnvironmentFailure, EpisodeError
from services.reward.environments.tool_calls.schema import function_schema
from services.reward.processes import child_setup

Step = tuple[str, float, bool]


class Functions:
    """Returns the functions' schemas, then answers calls. A ValueError is the caller's fault, any other the function's.

    reset() -> '[{"type": "function", ...}, ...]'
    step('{"name": "weather", "arguments": {"city": "Oslo"}}') -> '{"result": "rain"}' or '{"error": "no such city"}'
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
            EpisodeError: The result is not JSON. The function may raise anything but ValueError.
        """
        call = json.loads(text)
        function = self._functions[call["name"]]
        if inspect.iscoroutinefunction(function):
            return _answer_later(function(**call["arguments"]))
        try:
            return _answer(function(**call["arguments"]))
        except ValueError as error:
            return _error(error)


async def _answer_later(calling: Awaitable[object]) -> Step:
    try:
        return _answer(await calling)
    except ValueError as error:
        return _error(error)


def _answer(result: object) -> Step:
    try:
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        detail = f"a function returned what is not JSON: {error}"
        raise EpisodeError(EnvironmentFailure.INVALID_REPLY, detail) from error
    return json.dumps({"result": text}), 0.0, False


def _error(error: ValueError) -> Step:
    return json.dumps({"error": child_setup.explain(str(error))}), 0.0, False
