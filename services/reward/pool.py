"""A pool of processes that each call one function, and that can be killed at any moment without harm to the others.

The protocol with them is that of services/reward/worker.py.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

from services.reward.scorers.base import FailureReason, ScoringError

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
"""For a worker to import its function; sympy takes about one second, a user's module perhaps torch."""
MAX_REPLY_BYTES = 16 << 20
"""A thousand samples of a group, each failed with all the text that worker.py keeps of an error."""
# For a process that has closed its pipe, which it mostly does by ending, to be gone.
_END_S = 10.0


@dataclass(frozen=True)
class Target:
    """What a worker calls, and how it starts."""

    path: str
    """`module:function`."""
    max_memory_bytes: int | None = None
    """Limit of its address space."""
    init: dict[str, Any] | None = None
    """If set, the function is called once at the start, with these keywords, for a pair: what to call, its digest."""
    start_timeout_s: float = START_TIMEOUT_S


class Worker:
    """One process with one call at a time. After a call without an answer it is dead, and the next call restarts it."""

    def __init__(self, target: Target):
        self._target = target
        self._process: asyncio.subprocess.Process | None = None
        self.source_digest = ""

    @property
    def alive(self) -> bool:
        """Whether it runs and waits for a call."""
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        """Process id of the last start, 0 before the first."""
        return self._process.pid if self._process else 0

    async def start(self) -> None:
        """Starts the process and waits until its function is imported.

        Raises:
            ScoringError: It cannot be imported, or its source is no longer that of the first start.
        """
        # Pipes and JSON, so nothing is pickled; a session of its own, so that its children can be killed with it.
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "services.reward.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MAX_REPLY_BYTES,
            start_new_session=True,
        )
        target = self._target
        start = {"target": target.path, "init": target.init, "max_memory_bytes": target.max_memory_bytes}
        reply = await self._request(start, target.start_timeout_s)
        if self.source_digest not in ("", reply["source_digest"]):
            await self.kill()
            raise ScoringError(FailureReason.ERROR, "its source changed since OpenRun; close and open the run")
        self.source_digest = reply["source_digest"]

    async def call(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The process's reply, starting it if it is dead.

        Raises:
            ScoringError: TIMEOUT after `timeout_s`, CRASHED if the process died or its answer is none, or what
                the function raised.
        """
        if not self.alive:
            await self.start()
        return await self._request(message, timeout_s)

    async def kill(self) -> None:
        """Kills the process and its children, and waits until it is gone."""
        if self._process is None:
            return
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    async def _request(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        answered = False
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._exchange(message)
            answered = True
        except TimeoutError:
            raise ScoringError(FailureReason.TIMEOUT, f"no answer within {timeout_s:g} s") from None
        except (EOFError, OSError):
            raise ScoringError(FailureReason.CRASHED, f"worker died with exit code {await self._exit_code()}") from None
        except ValueError as error:
            detail = f"its reply is above {MAX_REPLY_BYTES} bytes or no JSON: {error}"
            raise ScoringError(FailureReason.CRASHED, detail) from error
        finally:
            if not answered:
                await self.kill()
        if "reason" in reply:
            raise _to_error(reply)
        return reply

    async def _exit_code(self) -> int:
        """Of a process that closed its pipe: its own code if it ends soon, else that of our kill."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        await self.kill()
        return self._process.returncode

    async def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        await self._process.stdin.drain()
        line = await self._process.stdout.readline()
        if not line.endswith(b"\n"):  # cut off, if there is any
            raise EOFError
        return json.loads(line)


class WorkerPool:
    """`num_workers` processes that call `target`. A dead one is replaced while the others go on."""

    def __init__(self, target: Target, *, num_workers: int, timeout_s: float):
        self._workers = [Worker(target) for _ in range(num_workers)]
        self._timeout_s = timeout_s
        self._idle: asyncio.Queue[Worker] = asyncio.Queue()
        self._restarts: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.pid for worker in self._workers]

    @property
    def source_digest(self) -> str:
        """Hash of the source file that the workers loaded."""
        return self._workers[0].source_digest

    async def open(self) -> None:
        """Starts all workers at once. After a failure or cancellation, `close` what did start.

        Raises:
            ScoringError: One cannot start.
        """
        results = await asyncio.gather(*(worker.start() for worker in self._workers), return_exceptions=True)
        for error in results:
            if error is not None:
                raise error
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def call(self, fields: dict[str, Any]) -> float:
        """The function's score for `fields`; waits for an idle worker first, which the time limit does not count.

        Raises:
            ScoringError: As Worker.call; CRASHED if the pool is closed.
        """
        return (await self._call({"fields": fields}))["score"]

    async def call_group(self, fields: dict[str, Any], num_samples: int) -> list[float | ScoringError]:
        """The function's scores for `fields` of a group, in one call: a number or a failure for each sample.

        Raises:
            ScoringError: As `call`, for the group as a whole.
        """
        reply = await self._call({"fields": fields, "num_samples": num_samples})
        return [_to_error(score) if isinstance(score, dict) else score for score in reply["scores"]]

    async def _call(self, message: dict[str, Any]) -> dict[str, Any]:
        worker = await self._idle.get()
        try:
            if self._closed:
                raise ScoringError(FailureReason.CRASHED, "the run was closed")
            return await worker.call(message, self._timeout_s)
        finally:
            self._give_back(worker)

    async def close(self) -> None:
        """Kills all workers; calls in progress and calls that wait fail as CRASHED."""
        self._closed = True
        for restart in self._restarts:
            restart.cancel()
        await asyncio.gather(*self._restarts, return_exceptions=True)
        await asyncio.gather(*(worker.kill() for worker in self._workers))

    def _give_back(self, worker: Worker) -> None:
        if worker.alive or self._closed:
            self._idle.put_nowait(worker)
            return
        restart = asyncio.create_task(self._restart(worker))
        self._restarts.add(restart)
        restart.add_done_callback(self._restarts.discard)
        restart.add_done_callback(lambda _: self._idle.put_nowait(worker))

    async def _restart(self, worker: Worker) -> None:
        try:
            await worker.start()
        except (ScoringError, OSError) as error:
            # The next call on it tries again and has the error as its answer.
            log.warning("a worker did not restart: %s", error)


def _to_error(reply: dict[str, str]) -> ScoringError:
    return ScoringError(FailureReason(reply["reason"]), reply["detail"])
