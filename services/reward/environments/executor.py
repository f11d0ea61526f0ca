"""Plays many episodes at the same time, in a worker process: with objects of a class, or an agent's function.

An object of a class gets these calls:

    -> {"call": "reset", "episode": "e", "seed": 7, "row": {"prompt": "...", ...}}
    <- {"messages": [{"role": "user", "content": "..."}]}
    -> {"call": "step", "episode": "e", "text": "..."}
    <- {"messages": [], "reward": 1.0, "done": true}
    -> {"call": "end", "episode": "e"}
    <- {}

Async methods run on the process's event loop. Those of an episode that are not async all run in one thread, which is
the episode's own, because much of what they may use stays with the thread that made it (sqlite3, event loops).
"""

import asyncio
import ctypes
import inspect
import math
import numbers
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from services.common.import_path import require_takes
from services.reward.errors import EnvironmentFailure, EpisodeError
from services.reward.processes import child
from services.reward.processes.child import Executor, Reply

MAX_REPLY_BYTES = 4 << 20
ROLES = ("user", "system", "tool")
"""Roles of the messages that a class may send, beside raw text."""
_STACK_BYTES = 2 << 20  # of a thread; the usual 8 MiB would let 500 episodes take all of the address space
_M_ARENA_MAX, _NUM_ARENAS = -8, 2


class EpisodeExecutor(Executor):
    """Executes the calls of many episodes."""

    too_long = EnvironmentFailure.INVALID_REPLY
    max_reply_bytes = MAX_REPLY_BYTES
    memory_key = "environment.max_memory_gib"


def make_threads_small() -> None:
    """Lets this process have threads of its own for hundreds of episodes."""
    if sys.platform == "linux":  # each arena of a thread takes 64 MiB of the address space, which is limited
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _NUM_ARENAS)
    threading.stack_size(_STACK_BYTES)


class ClassExecutor(EpisodeExecutor):
    """Plays each episode with an object of its own of the class `path`, made from `kwargs`."""

    def __init__(self, path: str, kwargs: Mapping[str, object]):
        make_threads_small()
        environment, self.version = _load(path, kwargs)
        self.facts = {"roles": _roles(environment)}
        self._make = partial(environment, **kwargs)
        # Not for classes with an async reset, which may need the event loop.
        self._makes_in_thread = not inspect.iscoroutinefunction(getattr(environment, "reset", None))
        self._episodes: dict[str, _Episode] = {}

    async def execute(self, call: Reply) -> Reply:
        name = call["episode"]
        if call["call"] == "reset":
            episode = self._episodes[name] = _Episode()
            await episode.make(self._make, in_thread=self._makes_in_thread)
            return {"messages": _read_messages(await episode.call("reset", seed=call["seed"], row=call["row"]))}
        if call["call"] == "step":
            return _read_step(await self._episodes[name].call("step", call["text"]))
        if episode := self._episodes.pop(name, None):
            await episode.close()
        return {}


def _load(target: str, kwargs: Mapping[str, object]) -> tuple[Callable[..., object], str]:
    """Returns the class and its version: its own, or else the hash of its source. Calls its `prepare`, if it has it."""
    environment, module = child.load(target)
    for method in ("reset", "step"):
        if not callable(getattr(environment, method, None)):
            raise TypeError(f"{target} has no method {method}")
    require_takes(environment, target, (), kwargs)
    _require_call(environment, "reset", target, (), {"seed": 0, "row": {}})
    _require_call(environment, "step", target, ("text",), {})
    if prepare := getattr(environment, "prepare", None):
        prepare(**kwargs)
    version = getattr(environment, "version", None)
    return environment, version if isinstance(version, str) else child.source_digest(module)


def _require_call(
    environment: Any, method: str, target: str, args: Sequence[str], kwargs: Mapping[str, object]
) -> None:
    """Checks the signature of a plain method, whose first argument is the object."""
    function = inspect.getattr_static(environment, method)
    if inspect.isfunction(function):
        require_takes(function, f"{target}.{method}", ("self", *args), kwargs)


def _roles(environment: object) -> list[str]:
    roles = getattr(environment, "roles", ROLES)
    if isinstance(roles, str) or not set(roles) <= set(ROLES):
        raise TypeError(f"roles must be some of {', '.join(ROLES)}, not {roles!r}")
    return list(roles)


class _Episode:
    """An object of the class, and the thread in which its methods run that are not async."""

    def __init__(self) -> None:
        self._object: Any = None
        self._thread = ThreadPoolExecutor(1)  # starts with the first call
        self._has_thread = False

    async def make(self, make: Callable[[], object], *, in_thread: bool) -> None:
        def keep() -> None:
            self._object = make()

        await self._run(keep) if in_thread else keep()

    async def call(self, method: str, *args: object, **kwargs: object) -> object:
        function = getattr(self._object, method)
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        return await self._run(function, *args, **kwargs)

    async def close(self) -> None:
        close = getattr(self._object, "close", None)
        try:
            if inspect.iscoroutinefunction(close):
                await close()
            elif close or self._has_thread:
                del close  # the object dies in its thread
                await self._run(self._drop)
        finally:
            self._thread.shutdown(wait=False)

    def _drop(self) -> object:
        dropped, self._object = self._object, None
        close = getattr(dropped, "close", None)
        return close() if close else None

    async def _run(self, function: Callable[..., object], *args: object, **kwargs: object) -> object:
        self._has_thread = True
        return await in_thread(self._thread, "environment", function, *args, **kwargs)


async def in_thread(
    threads: ThreadPoolExecutor, what: str, function: Callable[..., object], /, *args: object, **kwargs: object
) -> Any:
    """Calls a function in a thread; errors call it `what`. Awaits what it returns if that is to be awaited, as of an
    async function in a decorator.
    """
    idents = list[int]()
    thread = threads.submit(_without_stop_iteration, idents, what, function, *args, **kwargs)
    try:
        result = await asyncio.wrap_future(thread)
    except asyncio.CancelledError:
        if not thread.cancelled():  # it runs, and cannot be interrupted
            ended = asyncio.gather(asyncio.wrap_future(thread), return_exceptions=True)  # nobody waits for its error
            done, _ = await asyncio.wait({ended}, timeout=child.CANCEL_S / 2)
            if not done:
                _write_stack(idents, what)
                await asyncio.wait({ended})
        raise
    return await result if inspect.isawaitable(result) else result


def _without_stop_iteration(
    idents: list[int], what: str, function: Callable[..., object], /, *args: object, **kwargs: object
) -> object:
    """Calls the function, and adds the thread to `idents`. A future cannot hold a StopIteration, and would never be
    done: an error names `what`.
    """
    idents.append(threading.get_ident())
    try:
        return function(*args, **kwargs)
    except StopIteration as error:
        raise RuntimeError(f"the {what} raised StopIteration") from error


def _write_stack(idents: Sequence[int], what: str) -> None:
    """Writes where a thread hangs to the service's log."""
    frames = sys._current_frames()
    for frame in (frames[ident] for ident in idents if ident in frames):
        stack = traceback.extract_stack(frame)
        begin = max((index + 1 for index, one in enumerate(stack) if one.filename == __file__), default=len(stack))
        if own := "".join(traceback.format_list(stack[begin:])):  # else the function has just ended
            os.write(2, f"the {what} does not end; it is in:\n{own}".encode())


_STEP = "(observation, reward, done), or a dict with messages, reward and done"


def _read_messages(observation: object) -> list[dict[str, str]]:
    """Returns messages with role and content: none for None, one of the user for a text, or the list as it is."""
    if observation is None:
        return []
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    if not isinstance(observation, Sequence):
        raise invalid_reply(f"an observation must be None, text or a list of messages, not {observation!r:.200}")
    return [_message(message) for message in observation]


def _read_step(result: object) -> dict[str, object]:
    if isinstance(result, Mapping):
        if not {"reward", "done"} <= set(result) <= {"messages", "observation", "reward", "done"}:
            raise invalid_reply(f"step returned a dict with {', '.join(map(str, result))}: return {_STEP}")
        observation, reward, done = result.get("messages", result.get("observation")), result["reward"], result["done"]
    elif isinstance(result, tuple) and len(result) == 3:
        observation, reward, done = result
    else:
        raise invalid_reply(f"step returned {result!r:.200}: return {_STEP}")
    reward, done = child.plain(reward), child.plain(done)
    if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        raise invalid_reply(f"a reward must be a finite number, not {reward!r:.200}")
    if not isinstance(done, bool):
        raise invalid_reply(f"done must be True or False, not {done!r:.200}")
    return {"messages": _read_messages(observation), "reward": float(reward), "done": done}


def _message(message: object) -> dict[str, str]:
    if not isinstance(message, Mapping) or not {"role", "content"} <= set(message) <= {"role", "content", "name"}:
        raise invalid_reply(f"a message must have role and content, and perhaps name, not {message!r:.200}")
    if not all(isinstance(value, str) for value in message.values()):
        raise invalid_reply(f"a message's values must be text, not {message!r:.200}")
    return dict(message)


def invalid_reply(detail: str) -> EpisodeError:
    return EpisodeError(EnvironmentFailure.INVALID_REPLY, detail)


class AgentExecutor(EpisodeExecutor):
    """Calls an agent's function `path` once for each episode.

    -> {"call": "play", "episode": "e", "fields": {"row": {...}, "seed": 7, "url": "...", "key": "..."}}
    <- {"text": "..."}
    """

    def __init__(self, path: str):
        self._function, module = child.load(path)
        require_takes(self._function, path, (), dict.fromkeys(("row", "seed", "url", "key")))
        self.version = child.source_digest(module)

    async def execute(self, call: Reply) -> Reply:
        if call["call"] != "play":
            return {}
        text = await _call_function(self._function, call["fields"])
        if text is not None and not isinstance(text, str):
            fix = "return its final text, or None; the reward comes from reward.scorers"
            raise invalid_reply(f"the agent returned {text!r:.200}: {fix}")
        return {"text": text or ""}


async def _call_function(function: Callable[..., object], fields: Mapping[str, object]) -> object:
    """Calls a function on the event loop if it is async, else in a thread of its own."""
    if inspect.iscoroutinefunction(function):
        return await function(**fields)
    thread = ThreadPoolExecutor(1)
    try:
        return await in_thread(thread, "function", function, **fields)
    finally:
        thread.shutdown(wait=False)
