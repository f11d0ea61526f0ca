"""Runs worker processes: starts them, sends them calls, and kills and restarts them. child.py describes the protocol.

What the workers execute, and which of them gets a call, is said by those who derive from these classes: processes that
call a function (functions.py), and those that play episodes (environments/workers.py).
"""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from services.common.tasks import keep
from services.reward.errors import WorkError
from services.reward.processes.child import CANCEL_S, Reply

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0  # for the imports of a worker. sympy takes about 1 s; a user's module may import torch
# How much longer than a stuck call a worker may be silent about its cancellation before it counts as stalled.
_SILENCE_S = 2.0
# How long a process that has closed its pipe may take to exit, which on a busy machine is more than a moment.
_EXIT_S = 10.0
# How long the rest of a killed process's replies is read. What it left behind may hold its pipe open forever.
_REST_S = 1.0
W = TypeVar("W", bound="Worker")
Answer = asyncio.Future[Reply | WorkError]
Calls = dict[int, tuple[Mapping[str, object], Answer]]
"""Calls in progress by their number, and their answers to come."""


@dataclass(frozen=True)
class Target:
    """What a worker executes, and how it starts."""

    executor: str  # as `module:Class`
    settings: Mapping[str, object]  # arguments of the executor
    error: Callable[[str, str, str], WorkError]
    """Makes the error that is raised, of reason, detail and traceback."""
    failed: str
    """Reason of a failure of the user's code."""
    max_reply_bytes: int
    max_memory_bytes: int | None = None
    """Limit of the worker's address space."""
    start_timeout_s: float = START_TIMEOUT_S
    same_hashes: bool = False
    """Whether sets of text have the same order in every process. By default, Python makes it random."""


class Worker:
    """One process, in a session of its own so that its children can be killed with it; `start` restarts a dead one.

    A call that is canceled, or has no answer in its time limit, is canceled in the process; if that does not help, the
    process is killed.
    """

    def __init__(self, target: Target, version: str = ""):
        self._target = target
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._calls: Calls = {}
        self._last_begun = -1
        self._why_killed = ""
        self.version = version  # of what the run's first workers executed; empty for these
        self.facts: Reply = {}  # what the process said when it was ready

    @property
    def alive(self) -> bool:
        is_running = self._process is not None and self._process.returncode is None
        return is_running and self._reading is not None and not self._reading.done()

    @property
    def pid(self) -> int:
        """Id of the last started process; 0 if none was started."""
        return self._process.pid if self._process else 0

    async def start(self) -> None:
        """Starts the process, unless it is running, and waits until it has imported what it executes."""
        async with self._starting:
            if self.alive:
                return
            await self._end("")
            self._process, self._last_begun, self._why_killed = None, -1, ""
            is_ready = False
            try:
                facts = await self._begin()
                if self.version not in ("", facts["version"]):
                    changed = "its source changed since OpenRun; close and reopen the run"
                    raise self._target.error(self._target.failed, changed, "")
                self.facts, self.version, is_ready = facts, facts["version"], True
            finally:
                if not is_ready:
                    await self._end("")
            self._reading = asyncio.create_task(self._read())

    async def call(
        self, message: Mapping[str, object], limit_s: float | None = None, limited_by: str = "timeout_s"
    ) -> Reply:
        """Returns the reply to a call within `limit_s`, which errors say comes from the key `limited_by`.

        Raises:
            WorkError: TIMEOUT, CRASHED, or what the worker says.
        """
        if self._reading is None or self._reading.done():
            raise self._crash("the worker died")
        number, reply = next(self._numbers), asyncio.get_running_loop().create_future()
        self._calls[number] = message, reply
        try:
            async with asyncio.timeout(limit_s):
                with contextlib.suppress(OSError):  # it died: the reader reports why
                    await self._write({"id": number, **message})
                answer = await asyncio.shield(reply)
        except TimeoutError:
            late = f"no answer within {limit_s:g} s ({limited_by})"
            if await self._cancel(number, message, reply):
                raise self._crash(f"{late}, nor to other calls") from None
            raise self._target.error("TIMEOUT", late, "") from None
        except asyncio.CancelledError:
            await self._cancel(number, message, reply)
            raise
        if isinstance(answer, WorkError):
            raise answer
        if "reason" in answer:
            raise self._target.error(answer["reason"], str(answer["detail"]), answer.get("traceback", ""))
        return answer

    async def kill(self, why: str = "the run was closed") -> None:
        """Kills the process and its children, and waits until it is gone. Calls in progress fail for this reason."""
        await self._end(why)

    async def _cancel(self, number: int, call: Mapping[str, object], reply: Answer) -> bool:
        """Cancels a call, or else ends the process. Returns whether it ended and another call may be to blame."""
        has_others = any(other is not reply for _, other in self._calls.values())
        if not self.facts["is_concurrent"]:
            await self._end("a call was canceled")
            return has_others
        try:
            async with asyncio.timeout(CANCEL_S + _SILENCE_S):
                await self._write({"cancel": number})
                await asyncio.wait({reply})
        except TimeoutError:
            log.warning("worker %d is killed: it does not react any more", self.pid)
            await self._end("the worker did not react any more and was killed")
        except OSError:  # it died, and the reader finds out why
            await asyncio.wait({reply})
        answer = reply.result() if reply.done() else {}
        if not isinstance(answer, WorkError) and "stuck" in answer:
            await self._give_up(call)
        return has_others and not self.alive

    async def _give_up(self, call: Mapping[str, object]) -> None:
        """Is called when a canceled call does not end, although the process reacts."""
        await self._end("a canceled call did not end")

    def _lose(self, calls: Calls, why: str) -> None:
        for _, reply in calls.values():
            reply.set_result(self._crash(why))

    def _crash(self, detail: str) -> WorkError:
        return self._target.error("CRASHED", detail, "")

    async def _begin(self) -> Reply:
        """Starts the process and returns its first line."""
        target = self._target
        try:
            async with asyncio.timeout(target.start_timeout_s):
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "services.reward.processes.child",
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    limit=target.max_reply_bytes,
                    start_new_session=True,
                    env=os.environ | ({"PYTHONHASHSEED": "0"} if target.same_hashes else {}),
                )
                start = {"executor": target.executor, "settings": target.settings, "failed": target.failed}
                await self._write({**start, "max_memory_bytes": target.max_memory_bytes})
                facts = await self._next_line()
        except TimeoutError:
            raise target.error("TIMEOUT", f"no answer within {target.start_timeout_s:g} s", "") from None
        except (EOFError, OSError, ValueError) as error:
            raise self._crash(await self._why_ended(error)) from error
        if "reason" in facts:
            raise target.error(facts["reason"], facts["detail"], "")
        return facts

    async def _write(self, message: Mapping[str, object]) -> None:
        assert self._process and self._process.stdin, "start made it, with pipes"
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        await self._process.stdin.drain()

    async def _next_line(self) -> Reply:
        assert self._process and self._process.stdout, "start made it, with pipes"
        line = await self._process.stdout.readline()
        if not line.endswith(b"\n"):  # empty or incomplete: the process died
            raise EOFError
        return json.loads(line)

    async def _read(self) -> None:
        """Hands replies to their calls until the process ends or writes something else."""
        try:
            while True:
                reply = await self._next_line()
                if "ends" in reply:
                    raise EOFError(reply["ends"])
                if "began" in reply:
                    self._last_begun = reply["id"]
                else:
                    self._calls.pop(reply["id"])[1].set_result(reply)
        except (EOFError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = await self._why_ended(error)
        except asyncio.CancelledError:  # by _end
            why = "the worker was killed"
        calls, self._calls = self._calls, {}
        self._lose(calls, self._why_killed or why)

    async def _why_ended(self, error: Exception) -> str:
        """Returns why the process can answer no more, after it is gone."""
        if self._process is None:
            return f"a worker did not start: {type(error).__name__} {error}"
        if not isinstance(error, EOFError | OSError):
            await self._kill_session()
            size = self._target.max_reply_bytes
            return f"its reply has more than {size} bytes or is not JSON: {type(error).__name__} {error}"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_S):
                await self._process.wait()
        await self._kill_session()
        ends = f": {error}" if isinstance(error, EOFError) and error.args else ""
        return f"worker died with exit code {self._process.returncode}{ends}"

    async def _end(self, why: str) -> None:
        """Kills the process, and waits until its calls have failed."""
        self._why_killed = self._why_killed or why
        await self._kill_session()
        if self._reading:
            await asyncio.wait({self._reading}, timeout=_REST_S)
            self._reading.cancel()

    async def _kill_session(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):  # nothing is left of it
            os.killpg(self._process.pid, signal.SIGKILL)  # also if it has ended itself: its children may not have
        await self._process.wait()


class WorkerPool(Generic[W]):
    """Runs `workers`. A dead one can be restarted while the others continue."""

    def __init__(self, workers: Sequence[W]):
        self._workers = workers
        self._restarts: set[asyncio.Task[None]] = set()
        self.closed = False

    @property
    def version(self) -> str:
        return self._workers[0].version

    @property
    def facts(self) -> Reply:
        """What the workers said when they were ready."""
        return self._workers[0].facts

    async def open(self) -> None:
        """Starts all workers concurrently. After a failure or cancellation, call `close` to end those that started."""
        results = await asyncio.gather(*(worker.start() for worker in self._workers), return_exceptions=True)
        for error in results:
            if error is not None:
                raise error

    async def close(self) -> None:
        self.closed = True
        for restart in self._restarts:
            restart.cancel()
        await asyncio.gather(*self._restarts, return_exceptions=True)
        await asyncio.gather(*(worker.kill() for worker in self._workers))

    def _restart(self, worker: W) -> asyncio.Task[None]:
        """Starts a dead worker again. If that fails, the next call that needs the worker says why."""
        return keep(self._restarts, self._start(worker))

    async def _start(self, worker: W) -> None:
        try:
            await worker.start()
        except WorkError as error:
            log.warning("a worker did not restart: %s", error)
