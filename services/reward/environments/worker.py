"""Runs a worker process, which plays many episodes of a class at the same time. Both sides write lines of JSON.

    -> {"target": "package.module:Class", "kwargs": {}, "max_memory_bytes": 4294967296}      first line
    <- {"version": "3f2a...", "roles": ["user"]}                                             ready
    -> {"id": 1, "call": "reset", "episode": "e", "seed": 7, "row": {"prompt": "...", ...}}
    <- {"id": 1, "began": true}                                                              each call, then its reply:
    <- {"id": 1, "messages": [{"role": "user", "content": "..."}]}
    -> {"id": 2, "call": "step", "episode": "e", "text": "..."}
    <- {"id": 2, "messages": [], "reward": 1.0, "done": true}   or   {"id": 2, "reason": "CRASHED", "detail": "...",
                                                                                  "traceback": "..."}
    -> {"id": 2, "call": "cancel"}                                                           answered by 2's reply, or
    <- {"id": 2, "stuck": true}                                                              if it does not end
    -> {"id": 3, "call": "end", "episode": "e"}
    <- {"id": 3}

Async methods run on the process's event loop. Those of an episode that are not async all run in one thread, which is
the episode's own, because much of what they may use stays with the thread that made it (sqlite3, event loops). The
process always ends with its parent.
"""

import asyncio
import ctypes
import inspect
import json
import math
import numbers
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TextIO

from services.common.import_path import require_takes
from services.reward.errors import EnvironmentFailure, EpisodeError
from services.reward.processes import child_setup

_STEP = "(observation, reward, done), or a dict with messages, reward and done"


def read_messages(observation: object) -> list[dict[str, str]]:
    """Returns messages with role and content: none for None, one of the user for a text, or the list as it is.

    Raises:
        EpisodeError: INVALID_REPLY if it is something else.
    """
    if observation is None:
        return []
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    if not isinstance(observation, Sequence):
        raise _invalid(f"an observation must be None, text or a list of messages, not {observation!r:.200}")
    return [_message(message) for message in observation]


def read_step(result: object) -> dict[str, Any]:
    """Returns messages, reward and done.

    Raises:
        EpisodeError: INVALID_REPLY if it is not what a step returns, or the reward is not finite.
    """
    if isinstance(result, Mapping):
        if not {"reward", "done"} <= set(result) <= {"messages", "observation", "reward", "done"}:
            raise _invalid(f"step returned a dict with {', '.join(map(str, result))}: return {_STEP}")
        observation, reward, done = result.get("messages", result.get("observation")), result["reward"], result["done"]
    elif isinstance(result, tuple) and len(result) == 3:
        observation, reward, done = result
    else:
        raise _invalid(f"step returned {result!r:.200}: return {_STEP}")
    return {"messages": read_messages(observation), "reward": _reward(reward), "done": _done(done)}


def _message(message: object) -> dict[str, str]:
    if not isinstance(message, Mapping) or not {"role", "content"} <= set(message) <= {"role", "content", "name"}:
        raise _invalid(f"a message must have role and content, and perhaps name, not {message!r:.200}")
    if not all(isinstance(value, str) for value in message.values()):
        raise _invalid(f"a message's values must be text, not {message!r:.200}")
    return dict(message)


def _reward(reward: object) -> float:
    if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        raise _invalid(f"a reward must be a finite number, not {reward!r:.200}")
    return float(reward)


def _done(done: object) -> bool:
    # numpy's bool is no bool, and has no class in common with it.
    if not isinstance(done, bool) and type(done).__name__ not in ("bool", "bool_"):
        raise _invalid(f"done must be True or False, not {done!r:.200}")
    return bool(done)


def _invalid(detail: str) -> EpisodeError:
    return EpisodeError(EnvironmentFailure.INVALID_REPLY, detail)


MAX_REPLY_BYTES = 4 << 20
"""Maximum size of one reply. The parent kills a worker that writes a longer line."""
ROLES = ("user", "system", "tool")
"""Roles of the messages that a class may send, beside raw text."""
CANCEL_S = 2.0
"""How long a canceled call may take to end before it counts as stuck."""
_STACK_BYTES = 2 << 20  # of a thread; the usual 8 MiB would let 500 episodes take all of the address space
_M_ARENA_MAX, _NUM_ARENAS = -8, 2


def main() -> None:
    """Plays until the end of input."""
    child_setup.die_with_parent()
    requests, replies = child_setup.take_stdio()
    start = json.loads(requests.readline() or "null")
    if start is None:
        return
    if sys.platform == "linux":  # each arena of a thread takes 64 MiB of the address space, which is limited
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _NUM_ARENAS)
    child_setup.limit(start["max_memory_bytes"])
    threading.stack_size(_STACK_BYTES)
    try:
        environment, version = _load(start["target"], start["kwargs"])
        roles = _roles(environment)
    except Exception as error:  # noqa: BLE001 the process edge: the user's import may raise anything
        _write(replies, {"reason": EnvironmentFailure.CRASHED, "detail": child_setup.explain(error)})
        return
    _write(replies, {"version": version, "roles": roles})
    asyncio.run(_serve(Player(environment, start["kwargs"], replies), requests))


def _load(target: str, kwargs: Mapping[str, object]) -> tuple[Callable[..., object], str]:
    """Returns the class and its version: its own, or else the hash of its source. Calls its `prepare`, if it has it."""
    environment, module = child_setup.load(target)
    for method in ("reset", "step"):
        if not callable(getattr(environment, method, None)):
            raise TypeError(f"{target} has no method {method}")
    require_takes(environment, target, (), kwargs)
    _require_call(environment, "reset", target, (), {"seed": 0, "row": {}})
    _require_call(environment, "step", target, ("text",), {})
    if prepare := getattr(environment, "prepare", None):
        prepare(**kwargs)
    version = getattr(environment, "version", None)
    return environment, version if isinstance(version, str) else child_setup.source_digest(module)


def _require_call(
    environment: Any, method: str, target: str, args: Sequence[str], kwargs: Mapping[str, object]
) -> None:
    """Checks the signature of a plain method, whose first argument is the object."""
    function = inspect.getattr_static(environment, method)
    if inspect.isfunction(function):
        require_takes(function, f"{target}.{method}", ("self", *args), kwargs)


def _roles(environment: object) -> list[str]:
    """Returns the roles of the messages that a class may send: its `roles`, or all."""
    roles = getattr(environment, "roles", ROLES)
    if isinstance(roles, str) or not set(roles) <= set(ROLES):
        raise TypeError(f"roles must be some of {', '.join(ROLES)}, not {roles!r}")
    return list(roles)


async def _serve(player: "Player", requests: TextIO) -> None:
    loop = asyncio.get_running_loop()

    def receive() -> None:
        for line in requests:
            loop.call_soon_threadsafe(player.receive, json.loads(line))
        os._exit(0)  # threads of the user's may run forever

    threading.Thread(target=receive, daemon=True).start()
    await asyncio.Event().wait()


class Player:
    """Plays episodes, each with an object of its own."""

    def __init__(self, environment: Callable[..., object], kwargs: Mapping[str, object], replies: TextIO):
        self._make, self._replies = partial(environment, **kwargs), replies
        # Not for classes with an async reset, which may need the event loop.
        self._makes_in_thread = not inspect.iscoroutinefunction(getattr(environment, "reset", None))
        self._num_threads = getattr(environment, "num_threads", 1)
        self._episodes: dict[str, _Episode] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._cancels: set[asyncio.Task[None]] = set()

    def receive(self, request: Mapping[str, Any]) -> None:
        """Begins or cancels a call."""
        number = request["id"]
        if request["call"] != "cancel":
            self._calls[number] = asyncio.create_task(self._answer(request))
        elif number in self._calls:
            cancel = asyncio.create_task(self._cancel(number))
            self._cancels.add(cancel)
            cancel.add_done_callback(self._cancels.discard)

    async def _cancel(self, number: int) -> None:
        call = self._calls[number]
        call.cancel()
        await asyncio.wait({call}, timeout=CANCEL_S)
        if self._calls.pop(number, None):
            _write(self._replies, {"id": number, "stuck": True})

    async def _answer(self, request: Mapping[str, Any]) -> None:
        _write(self._replies, {"id": request["id"], "began": True})
        try:
            reply = await self._play(request)
        except asyncio.CancelledError:
            reply = _failure(EnvironmentFailure.TIMEOUT, "canceled")
        except EpisodeError as error:
            reply = _failure(error.reason, error.detail)
        except MemoryError:
            # After running out of memory the process must not play on.
            os.write(2, b"worker: out of memory (environment.max_memory_gib)\n")
            os._exit(1)
        except (Exception, SystemExit) as error:  # noqa: BLE001 the process edge: the user's class may raise anything
            text = child_setup.traceback_text(error, __file__)
            reply = {**_failure(EnvironmentFailure.CRASHED, error), "traceback": text}
        if self._calls.pop(request["id"], None):  # else it was stuck
            _write(self._replies, {"id": request["id"], **reply})

    async def _play(self, request: Mapping[str, Any]) -> Mapping[str, object]:
        name = request["episode"]
        if request["call"] == "reset":
            episode = self._episodes[name] = _Episode(self._num_threads)
            await episode.make(self._make, in_thread=self._makes_in_thread)
            return {"messages": read_messages(await episode.call("reset", seed=request["seed"], row=request["row"]))}
        if request["call"] == "step":
            return read_step(await self._episodes[name].call("step", request["text"]))
        if episode := self._episodes.pop(name, None):
            await episode.close()
        return {}


class _Episode:
    """Holds an object of the class, and the thread in which its methods run that are not async.

    Classes of ours that keep nothing in an episode may have more threads.
    """

    def __init__(self, num_threads: int) -> None:
        self._object: Any = None
        self._thread = ThreadPoolExecutor(num_threads)  # starts with the first call
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
        """Calls the object's close, if it has it, and drops the object in its thread."""
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
        thread = self._thread.submit(_without_stop_iteration, function, *args, **kwargs)
        try:
            result = await asyncio.wrap_future(thread)
        except asyncio.CancelledError:
            if not thread.cancelled():  # it runs, and cannot be interrupted
                await asyncio.wait({asyncio.wrap_future(thread)})
            raise
        return await result if inspect.isawaitable(result) else result


def _without_stop_iteration(function: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Calls the function. A future cannot hold a StopIteration, and would never be done."""
    try:
        return function(*args, **kwargs)
    except StopIteration as error:
        raise RuntimeError("the environment raised StopIteration") from error


def _failure(reason: EnvironmentFailure, what: BaseException | str) -> Mapping[str, object]:
    return {"reason": reason, "detail": child_setup.explain(what)}


def _write(replies: TextIO, message: Mapping[str, object]) -> None:
    line = json.dumps(message)
    if len(line) >= MAX_REPLY_BYTES:
        detail = f"the reply has {len(line)} bytes, more than {MAX_REPLY_BYTES}"
        line = json.dumps({"id": message["id"], **_failure(EnvironmentFailure.INVALID_REPLY, detail)})
    replies.write(line + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
