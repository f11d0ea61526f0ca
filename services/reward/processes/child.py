"""Runs a worker process, which executes calls: a line of JSON on stdin is answered by a line on stdout.

    -> {"executor": "package.module:Class", "settings": {...}, "failed": "ERROR", "max_memory_bytes": 4294967296}
    <- {"version": "3f2a...", "is_concurrent": true, ...}    ready; or {"reason": "ERROR", "detail": "..."}
    -> {"id": 1, ...}                                        a call, as the executor defines it
    <- {"id": 1, "began": true}                              if calls are concurrent
    <- {"id": 1, ...}   or   {"id": 1, "reason": "ERROR", "detail": "...", "traceback": "..."}
    -> {"cancel": 1}                                         answered by 1's reply, or
    <- {"id": 1, "stuck": true}                              if it does not end
    <- {"ends": "out of memory (...)"}                       before the process ends by itself

Calls run at the same time if the executor is concurrent; else one after the other, and cannot be canceled. The process
always ends with its parent: at the end of input, or by a signal from the kernel if it is busy when the parent dies.

Imports nothing heavy: what a worker needs beside its executor counts in every one of them.
"""

import asyncio
import ctypes
import hashlib
import importlib
import inspect
import json
import os
import resource
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, TextIO

from services.common.json_values import JsonMapping
from services.common.tasks import keep
from services.reward.errors import WorkError

Reply = JsonMapping
CANCEL_S = 2.0  # that a canceled call may take to end before it counts as stuck
_PR_SET_PDEATHSIG = 1
_MAX_DETAIL_CHARS = 1000
_MAX_TRACEBACK_CHARS = 8000
_LIBRARIES = ("<frozen ", *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")))


class Executor:
    """Executes the calls of one worker. Its arguments are the settings of the first line."""

    too_long = ""
    """Reason of the reply if one has `max_reply_bytes` or more; the parent kills a worker that writes many more."""
    max_reply_bytes = 1 << 62
    memory_key: str
    """Config key of the memory limit."""
    ends_by: tuple[type[BaseException], ...] = (MemoryError,)
    """Exceptions after which the process must not go on."""
    is_concurrent = True
    version: str
    """Text that changes whenever the same call could get another reply."""

    facts: Reply = MappingProxyType({})
    """What else the first reply says."""

    def execute(self, call: Reply) -> Any:
        """Returns the reply to a call; an awaitable of it if the executor is concurrent. May raise anything."""
        raise NotImplementedError


def main() -> None:
    """Serves calls until the end of input."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    requests, replies = _take_stdio()
    start = json.loads(requests.readline() or "null")
    if start is None:
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if "PYTHONBREAKPOINT" not in os.environ:  # pdb would only raise BdbQuit
        sys.breakpointhook = _refuse_breakpoint
    if limit := start["max_memory_bytes"]:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        executor = load(start["executor"])[0](**start["settings"])
        facts = {"version": executor.version, "is_concurrent": executor.is_concurrent, **executor.facts}
        ready = json.dumps(facts)
    except Exception as error:  # noqa: BLE001 the process edge: the user's import may raise anything
        _write(replies, {"reason": start["failed"], "detail": explain(error)})
        return
    _write(replies, ready)
    if executor.is_concurrent:  # this never returns: the process ends with its input
        asyncio.run(_serve(_ConcurrentCalls(executor, replies, start["failed"]), requests))
    for line in requests:  # outside of any event loop, which the user's function may want to run itself
        call = json.loads(line)
        try:
            reply = executor.execute(call)
        except BaseException as error:  # noqa: BLE001 the process edge: the user's code may raise anything
            reply = _failure(executor, replies, error, start["failed"])
        _write(replies, {"id": call["id"], **reply})


def _refuse_breakpoint(*_: object, **__: object) -> None:
    raise RuntimeError("breakpoint(): a worker has no terminal; call the function in a program of your own to debug it")


async def _serve(calls: "_ConcurrentCalls", requests: TextIO) -> None:
    loop = asyncio.get_running_loop()

    def read() -> None:
        for line in requests:
            loop.call_soon_threadsafe(calls.receive, json.loads(line))
        os._exit(0)  # threads of the user's may run forever

    threading.Thread(target=read, daemon=True).start()
    await asyncio.Event().wait()


class _ConcurrentCalls:
    def __init__(self, executor: Executor, replies: TextIO, failed: str):
        self._executor, self._replies, self._failed = executor, replies, failed
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._cancels: set[asyncio.Task[None]] = set()

    def receive(self, message: Reply) -> None:
        if "cancel" not in message:
            self._calls[message["id"]] = asyncio.create_task(self._answer(message))
        elif message["cancel"] in self._calls:
            keep(self._cancels, self._cancel(message["cancel"]))

    async def _cancel(self, number: int) -> None:
        call = self._calls[number]
        call.cancel()
        await asyncio.wait({call}, timeout=CANCEL_S)
        if self._calls.pop(number, None):
            _write(self._replies, {"id": number, "stuck": True})

    async def _answer(self, call: Reply) -> None:
        number, executor = call["id"], self._executor
        _write(self._replies, {"id": number, "began": True})
        try:
            reply = await executor.execute(call)
        except BaseException as error:  # noqa: BLE001 the process edge: the user's code may raise anything
            task = asyncio.current_task()
            is_ours = isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
            canceled = {"reason": "TIMEOUT", "detail": "canceled"}
            reply = canceled if is_ours else _failure(executor, self._replies, error, self._failed)
        if not self._calls.pop(number, None):
            return  # it was stuck
        line = json.dumps({"id": number, **reply})
        if len(line) >= executor.max_reply_bytes:
            detail = f"the reply has {len(line)} bytes, more than {executor.max_reply_bytes}"
            line = json.dumps({"id": number, "reason": executor.too_long, "detail": detail})
        _write(self._replies, line)


def _failure(executor: Executor, replies: TextIO, error: BaseException, failed: str) -> Reply:
    if isinstance(error, WorkError):
        return {"reason": error.reason, "detail": explain(error.detail)}
    if isinstance(error, executor.ends_by):
        try:
            why = f"out of memory ({executor.memory_key})" if isinstance(error, MemoryError) else f"sys.exit({error})"
            os.write(2, f"worker: {why}\n".encode())
            _write(replies, {"ends": explain(why)})
        finally:  # without memory, or without a parent, nothing of this may work
            os._exit(1)
    file = inspect.getfile(type(executor))
    detail = explain(error) + _place(error, file)
    return {"reason": failed, "detail": detail, "traceback": traceback_text(error, file)}


def _write(replies: TextIO, message: Reply | str) -> None:
    replies.write((message if isinstance(message, str) else json.dumps(message)) + "\n")
    replies.flush()


def _take_stdio() -> tuple[TextIO, TextIO]:
    """Returns the pipes to the parent, moved to other descriptors so that functions may read stdin or print."""
    requests, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return requests, replies


def load(target: str) -> tuple[Callable[..., Any], ModuleType]:
    """Returns what `module:name` names, and its module. Importing it may raise anything."""
    module_name, _, name = target.partition(":")
    module = importlib.import_module(module_name)
    loaded = getattr(module, name)
    if not callable(loaded):
        raise TypeError(f"{target} is not a function")
    return loaded, module


def source_digest(module: ModuleType) -> str:
    source = Path(module.__file__).read_bytes() if module.__file__ else b""
    return hashlib.sha256(source).hexdigest()[:12]


def plain(value: object) -> object:
    """Returns a number of numpy, such as np.True_, or a tensor with one number, as one of Python; else the value."""
    item = getattr(value, "item", None)
    return item() if item and getattr(value, "shape", None) == () else value


def explain(error: BaseException | str) -> str:
    """Returns the text of an error that is sent to the parent, with its class."""
    detail = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return detail[:_MAX_DETAIL_CHARS]


def _place(error: BaseException, module_file: str) -> str:
    """Returns the last line of the user's own code that an error came through; empty if there is none.

    The frames of libraries are left out, because they are the same for all of their errors.
    """
    frames = traceback.extract_tb(error.__traceback__)
    begin = max((index for index, frame in enumerate(frames) if frame.filename == module_file), default=-1) + 1
    own = [frame for frame in frames[begin:] if not frame.filename.startswith(_LIBRARIES)] or frames[begin : begin + 1]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""


def traceback_text(error: BaseException, module_file: str) -> str:
    """Returns the traceback of an error from the user's code, for the parent's log.

    Leaves out the frames before the call that `module_file` made.
    """
    first = frame = error.__traceback__
    while frame:
        if frame.tb_next and frame.tb_frame.f_code.co_filename == module_file:
            first = frame.tb_next
        frame = frame.tb_next
    return "".join(traceback.format_exception(error.with_traceback(first)))[-_MAX_TRACEBACK_CHARS:]


if __name__ == "__main__":
    main()
