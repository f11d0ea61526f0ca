"""Calls one function in a pool of processes: what a worker executes, and who gets a call.

-> {"fields": {"completion": "...", "answer": "...", ...}}                      keyword arguments
<- {"score": 1.0}
-> {"fields": {"completion": ["...", "..."], ...}, "num_samples": 2}            a prompt group
<- {"scores": [1.0, {"reason": "ERROR", "detail": "..."}]}
"""

import asyncio
import functools
import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from services.reward.errors import FailureReason, ScoringError
from services.reward.processes import child
from services.reward.processes.child import Executor, Reply
from services.reward.processes.conventions import Convention
from services.reward.processes.pool import START_TIMEOUT_S, Target, Worker, WorkerPool

MAX_REPLY_BYTES = 16 << 20
"""Enough for a group of 1000 samples that all fail with the longest error text that a worker keeps."""


def function_target(
    path: str,
    *,
    max_memory_bytes: int | None = None,
    init: Mapping[str, object] | None = None,
    arguments: Sequence[str] = (),
    start_timeout_s: float = START_TIMEOUT_S,
) -> Target:
    """Returns how a worker starts that calls a function.

    Args:
        path: Function to call, as `module:function`.
        max_memory_bytes: Limit of the worker's address space.
        init: If set, the function is called once at the start with these keyword arguments. It returns a pair: the
            function that scores, and its digest.
        arguments: Names of the keyword arguments of a call. If set, a function that does not take them is refused,
            unless it was written for TRL or verl.
        start_timeout_s: Time limit for the start.
    """
    return Target(
        "services.reward.processes.functions:FunctionExecutor",
        {"path": path, "init": init, "arguments": arguments},
        _to_error,
        failed=FailureReason.ERROR,
        max_reply_bytes=MAX_REPLY_BYTES,
        max_memory_bytes=max_memory_bytes,
        start_timeout_s=start_timeout_s,
    )


class FunctionPool(WorkerPool[Worker]):
    """Processes that call the function of `target`. A dead one is restarted while the others continue.

    They have `num_workers` calls at once, or `max_concurrent` if the function is async. `num_spares` more processes
    wait, so that the next call need not wait for the restart. A call whose worker dies is made `num_tries` times. If
    the function is async, another call may have been at fault: the call is then made again in a process without others.
    """

    def __init__(
        self,
        target: Target,
        *,
        num_workers: int,
        timeout_s: float,
        num_spares: int = 0,
        max_concurrent: int = 1,
        num_tries: int = 2,
    ):
        super().__init__([Worker(target) for _ in range(num_workers + num_spares)])
        self._num_workers, self._max_concurrent, self._num_tries = num_workers, max_concurrent, num_tries
        self._slots = asyncio.Semaphore(num_workers)
        self._timeout_s = timeout_s
        self._idle: asyncio.Queue[Worker] = asyncio.Queue()
        self._sending: set[asyncio.Task[Reply]] = set()
        self._alone, self._turn_alone = Worker(target), asyncio.Lock()

    async def open(self) -> None:
        await super().open()
        width = math.ceil(self._max_concurrent / self._num_workers) if self._is_async else 1
        self._slots = asyncio.Semaphore(self._max_concurrent if self._is_async else self._num_workers)
        for worker in [*self._workers] * width:
            self._idle.put_nowait(worker)

    async def close(self) -> None:
        await super().close()
        await self._alone.kill()
        await asyncio.gather(*self._sending, return_exceptions=True)

    async def call(self, fields: Mapping[str, object], limit_s: float = math.inf) -> float:
        """Returns the function's score for `fields`, within the pool's own time limit and `limit_s`, the share of
        reward.group_timeout_s that the sample has.

        Waiting for an idle worker does not count against the time limit. Errors are those of Worker.call.
        """
        return (await self._call({"fields": fields}, limit_s))["score"]

    async def call_group(self, fields: Mapping[str, object], num_samples: int) -> list[float | ScoringError]:
        """Returns the function's scores for the `fields` of a group, from one call: a number or failure per sample."""
        reply = await self._call({"fields": fields, "num_samples": num_samples})
        return [_to_error(**score) if isinstance(score, dict) else score for score in reply["scores"]]

    @property
    def _is_async(self) -> bool:
        return self.facts["is_concurrent"]

    async def _call(self, message: Mapping[str, object], limit_s: float = math.inf) -> Reply:
        num_tries = self._num_tries + self._is_async
        for attempt in range(num_tries):
            try:
                if attempt and self._is_async:
                    async with self._turn_alone, self._slots:
                        return await self._send(self._alone, message, limit_s)
                return await self._send_to_idle(message, limit_s)
            except ScoringError as error:
                if error.reason is not FailureReason.CRASHED or attempt == num_tries - 1:
                    raise
        raise AssertionError("the last try returns or raises")

    async def _send_to_idle(self, message: Mapping[str, object], limit_s: float) -> Reply:
        async with self._slots:
            worker = await self._idle.get()
            sending = asyncio.create_task(self._send(worker, message, limit_s))
            self._sending.add(sending)
            sending.add_done_callback(functools.partial(self._take_back, worker))
            try:
                return await asyncio.shield(sending)
            except asyncio.CancelledError:
                # A function that is not async can only be canceled with its process. Where none waits to take its
                # place, the next one may have a model to load: the call goes on, within its time limit, for nobody.
                if self._is_async or len(self._workers) > self._num_workers:
                    sending.cancel()
                    await asyncio.wait({sending})
                raise

    def _take_back(self, worker: Worker, sending: asyncio.Task[Reply]) -> None:
        self._sending.discard(sending)
        if not sending.cancelled():
            sending.exception()  # whoever waits for the call raises it
        if worker.alive or self.closed:
            self._idle.put_nowait(worker)
        else:  # if it does not restart, the next call on this worker tries again
            self._restart(worker).add_done_callback(lambda _: self._idle.put_nowait(worker))

    async def _send(self, worker: Worker, message: Mapping[str, object], limit_s: float) -> Reply:
        await worker.start()
        if limit_s < self._timeout_s:
            return await worker.call(message, limit_s, "a share of group_timeout_s")
        return await worker.call(message, self._timeout_s)


class FunctionExecutor(Executor):
    """Calls a function; calls of an async one run at the same time."""

    memory_key = "reward.max_memory_gib"
    ends_by = (MemoryError, SystemExit)

    def __init__(self, path: str, init: Mapping[str, object] | None, arguments: Sequence[str]):
        function, module = child.load(path)
        if init is not None:
            self._function, self.version = function(**init)
        else:
            self._function, self.version = function, child.source_digest(module)
        self._path = path
        self._convention = Convention(self._function, path, arguments) if arguments else None
        if self._convention:
            self.facts = {"convention": self._convention.name, "reads_tokens": self._convention.reads_tokens}
        methods = (self._function, getattr(self._function, "__call__", None))  # noqa: B004
        self.is_concurrent = any(map(inspect.iscoroutinefunction, methods))
        self._runner = asyncio.Runner()

    def execute(self, call: Reply) -> Any:
        fields, convention = call["fields"], self._convention
        result = self._function(**(convention.arguments(fields) if convention else fields))
        if not inspect.isawaitable(result):
            return self._reply(result, call)
        replying = self._reply_later(result, call)
        return replying if self.is_concurrent else self._runner.run(replying)

    async def _reply_later(self, result: Awaitable[object], call: Reply) -> Reply:
        return self._reply(await result, call)

    def _reply(self, result: object, call: Reply) -> Reply:
        read: Callable[[object], object] = self._convention.score if self._convention else lambda value: value
        num_samples = call.get("num_samples")
        if num_samples is None:
            return {"score": _score(read(result), self._path)}
        if isinstance(result, Mapping | Set | str | bytes) or not isinstance(result, Iterable):
            raise TypeError(f"the scores of a group must be a list of {num_samples} numbers, not {result!r:.200}")
        results = list(result)
        if len(results) != num_samples:
            raise ValueError(f"{len(results)} scores for {num_samples} samples")
        return {"scores": [_score_or_failure(read(result), self._path) for result in results]}


def _score(result: object, path: str) -> float:
    if isinstance(result, ScoringError):
        raise result
    result = child.plain(result)
    if not isinstance(result, numbers.Real) or not math.isfinite(result):
        fix = ": return 0 where it has nothing to judge" if result is None else ""
        raise TypeError(f"{path}: a score must be a finite number, not {result!r}{fix}")
    return float(result)


def _score_or_failure(result: object, path: str) -> float | Reply:
    try:
        return _score(result, path)
    except ScoringError as error:
        return {"reason": error.reason, "detail": child.explain(error.detail)}
    except (TypeError, OverflowError) as error:
        return {"reason": FailureReason.ERROR, "detail": child.explain(error)}


def _to_error(reason: str, detail: str, traceback: str = "") -> ScoringError:
    return ScoringError(FailureReason(reason), detail, traceback)
