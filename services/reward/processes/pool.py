"""Runs a pool of processes that call one function and can be killed at any time.

services/reward/processes/worker.py describes the protocol.
"""

import asyncio
import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.reward.errors import FailureReason, ScoringError
from services.reward.processes.child import Child, Reply
from services.reward.processes.crew import Crew

START_TIMEOUT_S = 60.0
"""Time limit for a worker to import its function. sympy takes about 1 s; a user's module may import torch."""
MAX_REPLY_BYTES = 16 << 20
"""Enough for a group of 1000 samples that all fail with the longest error text that worker.py keeps."""

# How long a canceled call of an async function may take to end.
_CANCEL_S = 2.0


@dataclass(frozen=True)
class Target:
    """Names the function that a worker calls, and says how it starts."""

    path: str
    """Function to call, as `module:function`."""
    max_memory_bytes: int | None = None
    """Limit of the worker's address space."""
    init: Mapping[str, object] | None = None
    """If set, the function is called once at the start with these keyword arguments. It returns a pair: the function
    that scores, and its digest."""
    start_timeout_s: float = START_TIMEOUT_S
    arguments: Sequence[str] = ()
    """Names of the keyword arguments of a call. If set, a function that does not take them is refused at the start."""


class Worker:
    """Runs one process, which the next call restarts if it is dead.

    One call at a time, unless the function is async. A call without an answer is canceled; if that does not help, the
    process is killed.
    """

    def __init__(self, target: Target):
        self._target = target
        self._child = Child("services.reward.processes.worker", MAX_REPLY_BYTES)
        self._starting = asyncio.Lock()
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Future[Reply | ScoringError]] = {}
        self._reading: asyncio.Task[None] | None = None
        self.source_digest, self.is_async = "", False

    @property
    def alive(self) -> bool:
        """Returns whether the process is running."""
        return self._child.alive and self._reading is not None and not self._reading.done()

    @property
    def pid(self) -> int:
        """Returns the id of the last started process; 0 if none was started."""
        return self._child.pid

    async def start(self) -> None:
        """Starts the process, unless it is running, and waits until its function is imported.

        Raises:
            ScoringError: The function cannot be imported, or its source has changed since the first start.
        """
        async with self._starting:
            if self.alive:
                return
            await self._child.kill()
            reply = await self._say_hello()
            if "reason" in reply:
                raise _to_error(reply)
            if self.source_digest not in ("", reply["source_digest"]):
                await self.kill()
                raise ScoringError(FailureReason.ERROR, "its source changed since OpenRun; close and reopen the run")
            self.source_digest, self.is_async = reply["source_digest"], reply["is_async"]
            self._reading = asyncio.create_task(self._read())

    async def call(self, message: Mapping[str, object], timeout_s: float) -> Reply:
        """Sends a call and returns the reply. Starts the process first if it is dead.

        Raises:
            ScoringError: TIMEOUT after `timeout_s`; CRASHED if the process died or its reply is invalid, or another
                call blocks it; or the error that the function raised.
        """
        await self.start()
        number, reply = next(self._numbers), asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        answered = False
        try:
            async with asyncio.timeout(timeout_s):
                with contextlib.suppress(OSError):  # it died: the reader reports why
                    await self._child.write({"id": number, **message})
                answer = await asyncio.shield(reply)
            answered = True
        except TimeoutError:
            answer = ScoringError(FailureReason.TIMEOUT, f"no answer within {timeout_s:g} s")
        finally:
            if not answered and await self._is_blocked(number, reply):
                answer = ScoringError(FailureReason.CRASHED, f"no answer within {timeout_s:g} s, nor to other samples")
        if isinstance(answer, ScoringError):
            raise answer
        if "reason" in answer:
            raise _to_error(answer)
        return answer

    async def kill(self) -> None:
        """Kills the process and its children, and waits until it is gone."""
        await self._child.kill()

    async def _is_blocked(self, number: int, reply: asyncio.Future[Reply | ScoringError]) -> bool:
        """Cancels a call, or else kills the process. Returns whether another call may have blocked it."""
        others = [one for one in self._replies.values() if one is not reply]
        if self.is_async:
            with contextlib.suppress(TimeoutError, OSError):
                async with asyncio.timeout(_CANCEL_S):
                    await self._child.write({"cancel": number})
                    await asyncio.wait({reply})
                    return False
        await self.kill()
        return bool(others)

    async def _say_hello(self) -> Reply:
        target, started = self._target, False
        try:
            async with asyncio.timeout(target.start_timeout_s):
                await self._child.start()
                await self._child.write(
                    {
                        "target": target.path,
                        "init": target.init,
                        "arguments": target.arguments,
                        "max_memory_bytes": target.max_memory_bytes,
                    }
                )
                reply = await self._child.read()
            started = "reason" not in reply
            return reply
        except TimeoutError:
            detail = f"no answer within {target.start_timeout_s:g} s"
            raise ScoringError(FailureReason.TIMEOUT, detail) from None
        except (EOFError, OSError, ValueError) as error:
            raise await self._crash(error) from error
        finally:
            if not started:
                await self.kill()

    async def _read(self) -> None:
        """Hands replies to their calls until the process ends or writes something else."""
        try:
            while True:
                answer = await self._child.read()
                self._replies.pop(answer["id"]).set_result(answer)
        except (EOFError, OSError, ValueError, KeyError, TypeError) as error:
            crash = await self._crash(error)
        replies, self._replies = self._replies, {}
        for reply in replies.values():
            reply.set_result(crash)

    async def _crash(self, error: Exception) -> ScoringError:
        """Returns why the process can answer no more, after it is gone."""
        if isinstance(error, EOFError | OSError):
            return ScoringError(FailureReason.CRASHED, f"worker died with exit code {await self._child.exit_code()}")
        await self.kill()
        detail = f"its reply has more than {MAX_REPLY_BYTES} bytes or is not JSON: {error}"
        return ScoringError(FailureReason.CRASHED, detail)


class WorkerPool(Crew[Worker]):
    """Runs processes that call `target`. A dead one is restarted while the others continue.

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
        self._alone, self._turn_alone = Worker(target), asyncio.Lock()

    @property
    def source_digest(self) -> str:
        """Returns the hash of the source file that the workers loaded."""
        return self._workers[0].source_digest

    async def open(self) -> None:
        await super().open()
        width = math.ceil(self._max_concurrent / self._num_workers) if self._workers[0].is_async else 1
        self._slots = asyncio.Semaphore(self._num_workers * width)
        for worker in [*self._workers] * width:
            self._idle.put_nowait(worker)

    async def close(self) -> None:
        await super().close()
        await self._alone.kill()

    async def call(self, fields: Mapping[str, object], limit_s: float = math.inf) -> float:
        """Returns the function's score for `fields`, within `limit_s` and the pool's own time limit.

        Waiting for an idle worker does not count against the time limit.

        Raises:
            ScoringError: As in Worker.call; CRASHED if the pool is closed.
        """
        return (await self._call({"fields": fields}, limit_s))["score"]

    async def call_group(self, fields: Mapping[str, object], num_samples: int) -> list[float | ScoringError]:
        """Returns the function's scores for the `fields` of a group, from one call: a number or failure per sample.

        Raises:
            ScoringError: As in `call`, if the whole group has no scores.
        """
        reply = await self._call({"fields": fields, "num_samples": num_samples})
        return [_to_error(score) if isinstance(score, dict) else score for score in reply["scores"]]

    async def _call(self, message: Mapping[str, object], limit_s: float = math.inf) -> Reply:
        tries = [self._try] * self._num_tries
        if self._workers[0].is_async:
            tries = [self._try, *[self._try_alone] * self._num_tries]
        for attempt in tries[:-1]:
            try:
                return await attempt(message, limit_s)
            except ScoringError as error:
                if error.reason is not FailureReason.CRASHED or self._closed:
                    raise
        return await tries[-1](message, limit_s)

    async def _try_alone(self, message: Mapping[str, object], limit_s: float) -> Reply:
        async with self._turn_alone:
            self._require_open()
            return await self._alone.call(message, min(limit_s, self._timeout_s))

    async def _try(self, message: Mapping[str, object], limit_s: float) -> Reply:
        async with self._slots:
            worker = await self._idle.get()
            try:
                self._require_open()
                return await worker.call(message, min(limit_s, self._timeout_s))
            finally:
                self._give_back(worker)

    def _require_open(self) -> None:
        if self._closed:
            raise ScoringError(FailureReason.CRASHED, "the run was closed")

    def _give_back(self, worker: Worker) -> None:
        if worker.alive or self._closed:
            self._idle.put_nowait(worker)
            return
        # If it fails, the next call on this worker tries again.
        self._restart(worker).add_done_callback(lambda _: self._idle.put_nowait(worker))


def _to_error(reply: Reply) -> ScoringError:
    return ScoringError(FailureReason(reply["reason"]), reply["detail"], reply.get("traceback", ""))
