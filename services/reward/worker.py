"""Runs a worker process, which calls one function for each line of JSON on stdin and replies with a line of JSON.

    -> {"target": "package.module:function", "init": null, "max_memory_bytes": 4294967296}     first line
    <- {"source_digest": "3f2a..."}                                                            ready
    -> {"fields": {"completion": "...", "answer": "...", ...}}                                 keyword arguments
    <- {"score": 1.0}   or   {"reason": "ERROR", "detail": "...", "traceback": "..."}
    -> {"fields": {"completion": ["...", "..."], ...}, "num_samples": 2}                       a prompt group
    <- {"scores": [1.0, {"reason": "ERROR", "detail": "..."}]}   or   {"reason": ..., "detail": ...}

The process always ends with its parent: at the end of input, or by a signal from the kernel if it is busy when the
parent dies.
"""

import asyncio
import ctypes
import hashlib
import importlib
import inspect
import json
import math
import numbers
import os
import resource
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, TypeVar

from services.reward.scorers.base import FailureReason, ScoringError

Value = TypeVar("Value")
Function = Callable[..., Any]
Reply = Mapping[str, Any]
"""A line of JSON that a worker writes."""
_PR_SET_PDEATHSIG = 1
_MAX_DETAIL_CHARS = 1000
_MAX_TRACEBACK_CHARS = 8000


def main() -> None:
    """Serves calls until the end of input."""
    _die_with_parent()
    requests, replies = _take_stdio()
    start = json.loads(requests.readline() or "null")
    if start is None:
        return
    _limit(start["max_memory_bytes"])
    try:
        function, source_digest = _load(start["target"], start["init"])
    except Exception as error:  # noqa: BLE001 the process edge: the user's import may raise anything
        _reply(replies, _failure(FailureReason.ERROR, error))
        return
    _reply(replies, {"source_digest": source_digest})
    with asyncio.Runner() as runner:
        for line in requests:
            _reply(replies, _answer(function, json.loads(line), runner))


def _take_stdio() -> tuple[TextIO, TextIO]:
    """Returns the pipes to the parent, moved to other descriptors so that functions may read stdin or print."""
    requests, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return requests, replies


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _limit(max_memory_bytes: int | None) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if max_memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))


def _load(target: str, init: Mapping[str, object] | None) -> tuple[Function, str]:
    """Returns the function `module:function` and the hash of its module's source; with `init`, what it returns."""
    module_name, _, function_name = target.partition(":")
    module = importlib.import_module(module_name)
    function: Function = getattr(module, function_name)
    if not callable(function):
        raise TypeError(f"{target} is not a function")
    if init is not None:
        return function(**init)
    source = Path(module.__file__).read_bytes() if module.__file__ else b""
    return function, hashlib.sha256(source).hexdigest()[:12]


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
        text = "".join(traceback.format_exception(error.with_traceback(_own_frames(error))))
        return {**_failure(FailureReason.ERROR, error), "traceback": text[-_MAX_TRACEBACK_CHARS:]}


def _own_frames(error: Exception) -> TracebackType | None:
    """Returns the traceback without this module's frame, if the function has one."""
    frames = error.__traceback__
    return frames.tb_next or frames if frames else None


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
    detail = what if isinstance(what, str) else f"{type(what).__name__}: {what}"
    return {"reason": reason, "detail": detail[:_MAX_DETAIL_CHARS]}


def _reply(replies: TextIO, message: Reply) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
