"""Runs a worker process, which calls one function for each line of JSON on stdin and replies with a line of JSON.

    -> {"target": "package.module:function", "init": null, "arguments": ["completion", ...],
        "max_memory_bytes": 4294967296}                                                        first line
    <- {"source_digest": "3f2a...", "is_async": false}                                         ready
    -> {"id": 1, "fields": {"completion": "...", "answer": "...", ...}}                        keyword arguments
    <- {"id": 1, "score": 1.0}   or   {"id": 1, "reason": "ERROR", "detail": "...", "traceback": "..."}
    -> {"id": 2, "fields": {"completion": ["...", "..."], ...}, "num_samples": 2}              a prompt group
    <- {"id": 2, "scores": [1.0, {"reason": "ERROR", "detail": "..."}]}   or   {"id": 2, "reason": ..., "detail": ...}
    -> {"cancel": 2}                                                                           answered by 2's reply

Calls of an async function run at the same time; those of another one after the other, and cannot be canceled.
The process always ends with its parent: at the end of input, or by a signal from the kernel if it is busy when the
parent dies.
"""

import asyncio
import inspect
import json
import math
import numbers
import os
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TextIO, TypeVar

from services.common.import_path import require_takes
from services.reward.errors import FailureReason, ScoringError
from services.reward.processes import child_setup

Value = TypeVar("Value")
Function = Callable[..., Any]
Reply = Mapping[str, Any]
"""A line of JSON that a worker writes."""


def main() -> None:
    """Serves calls until the end of input."""
    child_setup.die_with_parent()
    requests, replies = child_setup.take_stdio()
    start = json.loads(requests.readline() or "null")
    if start is None:
        return
    child_setup.limit(start["max_memory_bytes"])
    try:
        function, source_digest = _load(start["target"], start["init"])
        if start["arguments"]:
            require_takes(function, start["target"], (), dict.fromkeys(start["arguments"]))
    except Exception as error:  # noqa: BLE001 the process edge: the user's import may raise anything
        _reply(replies, _failure(FailureReason.ERROR, error))
        return
    is_async = any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004
    _reply(replies, {"source_digest": source_digest, "is_async": is_async})
    with asyncio.Runner() as runner:
        if is_async:
            runner.run(_serve(function, requests, replies))
        for line in requests:
            message = json.loads(line)
            _reply(replies, {"id": message["id"], **_answer(function, message, runner)})


def _load(target: str, init: Mapping[str, object] | None) -> tuple[Function, str]:
    """Returns the function `module:function` and the hash of its module's source; with `init`, the results of that."""
    function, module = child_setup.load(target)
    return function(**init) if init is not None else (function, child_setup.source_digest(module))


def _answer(function: Function, message: Mapping[str, Any], runner: asyncio.Runner) -> Reply:
    try:
        result = function(**message["fields"])
        return _result(runner.run(_wait_for(result)) if inspect.isawaitable(result) else result, message)
    except Exception as error:  # noqa: BLE001 the process edge: the user's function may raise anything
        return _error(error)


async def _serve(function: Function, requests: TextIO, replies: TextIO) -> None:
    """Answers calls at the same time. Never returns; the process ends with its input."""
    loop, calls = asyncio.get_running_loop(), dict[int, asyncio.Task[None]]()

    async def answer(message: Mapping[str, Any]) -> None:
        try:
            reply = _result(await function(**message["fields"]), message)
        except asyncio.CancelledError:
            reply = _failure(FailureReason.TIMEOUT, "canceled")
        except (Exception, SystemExit) as error:  # noqa: BLE001 the process edge, as above
            reply = _error(error)
        del calls[message["id"]]
        _reply(replies, {"id": message["id"], **reply})

    def receive(message: Mapping[str, Any]) -> None:
        if "cancel" not in message:
            calls[message["id"]] = loop.create_task(answer(message))
        elif call := calls.get(message["cancel"]):
            call.cancel()

    def read() -> None:
        for line in requests:
            loop.call_soon_threadsafe(receive, json.loads(line))
        os._exit(0)  # threads of the user's may run forever

    threading.Thread(target=read, daemon=True).start()
    await asyncio.Event().wait()


def _error(error: BaseException) -> Reply:
    if isinstance(error, ScoringError):
        return _failure(error.reason, error.detail)
    if isinstance(error, MemoryError | SystemExit):
        # After running out of memory the process must not score further samples.
        why = "out of memory (reward.max_memory_gib)" if isinstance(error, MemoryError) else f"exits: {error}"
        os.write(2, f"worker: {why}\n".encode())
        os._exit(1)
    return {**_failure(FailureReason.ERROR, error), "traceback": child_setup.traceback_text(error, __file__)}


def _result(result: Any, message: Mapping[str, Any]) -> Reply:
    if "num_samples" in message:
        return {"scores": _scores(result, message["num_samples"])}
    return {"score": _score(result)}


def _score(result: object) -> float:
    if isinstance(result, ScoringError):
        raise result
    if not isinstance(result, numbers.Real) or not math.isfinite(result):
        raise TypeError(f"a score must be a finite number, not {result!r}")
    return float(result)


def _scores(results: Iterable[object], num_samples: int) -> list[float | Reply]:
    results = list(results)
    if len(results) != num_samples:
        raise ValueError(f"{len(results)} scores for {num_samples} samples")
    return [_score_or_failure(result) for result in results]


def _score_or_failure(result: object) -> float | Reply:
    try:
        return _score(result)
    except ScoringError as error:
        return _failure(error.reason, error.detail)
    except (TypeError, OverflowError) as error:
        return _failure(FailureReason.ERROR, error)


async def _wait_for(result: Awaitable[Value]) -> Value:
    return await result


def _failure(reason: FailureReason, what: BaseException | str) -> Reply:
    return {"reason": reason, "detail": child_setup.explain(what)}


def _reply(replies: TextIO, message: Reply) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
