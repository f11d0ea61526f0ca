"""Runs a worker process, which calls one function for each line of JSON on stdin and replies with a line of JSON.

    -> {"target": "package.module:function", "init": null, "arguments": ["completion", ...],
        "max_memory_bytes": 4294967296}                                                        first line
    <- {"source_digest": "3f2a..."}                                                            ready
    -> {"fields": {"completion": "...", "answer": "...", ...}}                                 keyword arguments
    <- {"score": 1.0}   or   {"reason": "ERROR", "detail": "...", "traceback": "..."}
    -> {"fields": {"completion": ["...", "..."], ...}, "num_samples": 2}                       a prompt group
    <- {"scores": [1.0, {"reason": "ERROR", "detail": "..."}]}   or   {"reason": ..., "detail": ...}

The process always ends with its parent: at the end of input, or by a signal from the kernel if it is busy when the
parent dies.
"""

import asyncio
import inspect
import json
import math
import numbers
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TextIO, TypeVar

from services.common.signature import require_takes
from services.reward.processes import child_setup
from services.reward.scorers.base import FailureReason, ScoringError

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
    _reply(replies, {"source_digest": source_digest})
    with asyncio.Runner() as runner:
        for line in requests:
            _reply(replies, _answer(function, json.loads(line), runner))


def _load(target: str, init: Mapping[str, object] | None) -> tuple[Function, str]:
    """Returns the function `module:function` and the hash of its module's source; with `init`, the results of that."""
    function, module = child_setup.load(target)
    return function(**init) if init is not None else (function, child_setup.source_digest(module))


def _answer(function: Function, message: Mapping[str, Any], runner: asyncio.Runner) -> Reply:
    try:
        result = function(**message["fields"])
        if inspect.isawaitable(result):
            result = runner.run(_wait_for(result))
        if "num_samples" in message:
            return {"scores": _scores(result, message["num_samples"])}
        return {"score": _score(result)}
    except ScoringError as error:
        return _failure(error.reason, error.detail)
    except MemoryError:
        # After running out of memory the process must not score further samples.
        sys.exit("worker: out of memory (reward.max_memory_gib)")
    except Exception as error:  # noqa: BLE001 the process edge: the user's function may raise anything
        return {**_failure(FailureReason.ERROR, error), "traceback": child_setup.traceback_text(error, __file__)}


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


def _failure(reason: FailureReason, what: Exception | str) -> Reply:
    return {"reason": reason, "detail": child_setup.explain(what)}


def _reply(replies: TextIO, message: Reply) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
