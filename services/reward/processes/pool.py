"""Runs a pool of processes that call one function and can be killed at any time without affecting each other.

services/reward/processes/worker.py describes the protocol.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.reward.processes.child import Child, Reply
from services.reward.processes.crew import Crew
from services.reward.scorers.base import FailureReason, ScoringError

START_TIMEOUT_S = 60.0
"""Time limit for a worker to import its function. sympy takes about 1 s; a user's module may import torch."""
MAX_REPLY_BYTES = 16 << 20
"""Enough for a group of 1000 samples that all fail with the longest error text that worker.py keeps."""


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
    """Runs one process, one call at a time. A call without an answer kills the process; the next call restarts it."""

    def __init__(self, target: Target):
        self._target = target
        self._child = Child("services.reward.processes.worker", MAX_REPLY_BYTES)
        self.source_digest = ""

    @property
    def alive(self) -> bool:
        """Returns whether the process is running."""
        return self._child.alive

    @property
    def pid(self) -> int:
        """Returns the id of the last started process; 0 if none was started."""
        return self._child.pid

    async def start(self) -> None:
        """Starts the process and waits until its function is imported.

        Raises:
            ScoringError: The function cannot be imported, or its source has changed since the first start.
        """
        await self._child.start()
        target = self._target
        start = {
            "target": target.path,
            "init": target.init,
            "arguments": target.arguments,
            "max_memory_bytes": target.max_memory_bytes,
        }
        reply = await self._request(start, target.start_timeout_s)
        if self.source_digest not in ("", reply["source_digest"]):
            await self.kill()
            raise ScoringError(FailureReason.ERROR, "its source changed since OpenRun; close and reopen the run")
        self.source_digest = reply["source_digest"]

    async def call(self, message: Mapping[str, object], timeout_s: float) -> Reply:
        """Sends a call and returns the reply. Starts the process first if it is dead.

        Raises:
            ScoringError: TIMEOUT after `timeout_s`; CRASHED if the process died or its reply is invalid; or the error
                that the function raised.
        """
        if not self.alive:
            await self.start()
        return await self._request(message, timeout_s)

    async def kill(self) -> None:
        """Kills the process and its children, and waits until it is gone."""
        await self._child.kill()

    async def _request(self, message: Mapping[str, object], timeout_s: float) -> Reply:
        answered = False
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._exchange(message)
            answered = True
        except TimeoutError:
            raise ScoringError(FailureReason.TIMEOUT, f"no answer within {timeout_s:g} s") from None
        except (EOFError, OSError):
            raise ScoringError(
                FailureReason.CRASHED, f"worker died with exit code {await self._child.exit_code()}"
            ) from None
        except ValueError as error:
            detail = f"its reply has more than {MAX_REPLY_BYTES} bytes or is not JSON: {error}"
            raise ScoringError(FailureReason.CRASHED, detail) from error
        finally:
            if not answered:
                await self.kill()
        if "reason" in reply:
            raise _to_error(reply)
        return reply

    async def _exchange(self, message: Mapping[str, object]) -> Reply:
        await self._child.write(message)
        return await self._child.read()


class WorkerPool(Crew[Worker]):
    """Runs processes that call `target`, `num_workers` at once. A dead one is restarted while the others continue.

    `num_spares` more processes wait, so that the next call need not wait for the restart.
    """

    def __init__(self, target: Target, *, num_workers: int, timeout_s: float, num_spares: int = 0):
        super().__init__([Worker(target) for _ in range(num_workers + num_spares)])
        self._slots = asyncio.Semaphore(num_workers)
        self._timeout_s = timeout_s
        self._idle: asyncio.Queue[Worker] = asyncio.Queue()

    @property
    def source_digest(self) -> str:
        """Returns the hash of the source file that the workers loaded."""
        return self._workers[0].source_digest

    async def open(self) -> None:
        await super().open()
        for worker in self._workers:
            self._idle.put_nowait(worker)

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
        async with self._slots:
            worker = await self._idle.get()
            try:
                if self._closed:
                    raise ScoringError(FailureReason.CRASHED, "the run was closed")
                return await worker.call(message, min(limit_s, self._timeout_s))
            finally:
                self._give_back(worker)

    def _give_back(self, worker: Worker) -> None:
        if worker.alive or self._closed:
            self._idle.put_nowait(worker)
            return
        # If it fails, the next call on this worker tries again.
        self._restart(worker).add_done_callback(lambda _: self._idle.put_nowait(worker))


def _to_error(reply: Reply) -> ScoringError:
    return ScoringError(FailureReason(reply["reason"]), reply["detail"], reply.get("traceback", ""))
