"""Runs the services of a campaign behind proxies, and starts them again when they end.

The zygote, a process that has imported their modules, forks them. Each tells its events to a socket, the gate, and
waits there for an answer.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.reward.v1 import reward_pb2
from lockstep.reward.v1.reward_pb2_grpc import RewardServiceServicer, RewardServiceStub
from lockstep.rollout.v1 import rollout_pb2
from lockstep.rollout.v1.rollout_pb2_grpc import RolloutServiceServicer, RolloutServiceStub
from lockstep.trainer.v1 import trainer_pb2
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer, TrainerServiceStub

from services.common.errors import LockstepError
from services.common.rpc.client import Client
from tests.campaign.proxy import Proxy
from tests.support import descendants, free_port

SERVICES = ("trainer", "reward", "rollout-0", "rollout-1")
_START_S, _ANSWER_S = 120.0, 10.0
_ASKING: Mapping[str, Any] = {
    "trainer": (TrainerServiceStub, TrainerServiceServicer.GetInfo, trainer_pb2.GetInfoRequest()),
    "rollout": (RolloutServiceStub, RolloutServiceServicer.GetInfo, rollout_pb2.GetInfoRequest()),
    "reward": (RewardServiceStub, RewardServiceServicer.GetInfo, reward_pb2.GetInfoRequest()),
}


_ENGINE = r"toy_engine|EngineCore"
# Processes that services start: the service, and a pattern that the command line of the process matches.
_BELOW = {
    "rank-1": ("trainer", ""),
    "engine-0": ("rollout-0", _ENGINE),
    "engine-1": ("rollout-1", _ENGINE),
    "worker": ("reward", r"graders|libraries|tools.functions|processes|executor"),
}


@dataclass
class Process:
    """Holds a process that was started. `code` is set once it has ended."""

    kind: str
    pid: int
    log: Path
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    code: int | None = None

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.code is None:
                os.kill(self.pid, number)


class Zygote:
    """Starts the zygote, and asks it to fork other processes."""

    def __init__(self) -> None:
        self._processes: dict[int, Process] = {}
        self._answers: asyncio.Queue[int] = asyncio.Queue()
        self._turn = asyncio.Lock()

    async def start(self, log: Path) -> None:
        with log.open("ab") as output:
            self._child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.campaign.zygote", stdin=-1, stdout=-1, stderr=output
            )
        assert self._child.stdout
        async with asyncio.timeout(_START_S):
            assert json.loads(await self._child.stdout.readline()) == {"ready": True}
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self._child.stdout
        while line := await self._child.stdout.readline():
            answer = json.loads(line)
            if "pid" in answer:
                self._answers.put_nowait(answer["pid"])
                continue
            while answer["exited"] not in self._processes:  # it ended before `fork` has created its Process
                await asyncio.sleep(0)
            process = self._processes.pop(answer["exited"])
            process.code = answer["code"]
            process.ended.set()

    async def fork(
        self, kind: str, args: list[str], log: Path, gate: Path | None, cwd: Path, *, is_real: bool = False
    ) -> Process:
        assert self._child.stdin
        asked = {
            "kind": kind,
            "args": args,
            "log": str(log),
            "gate": str(gate or ""),
            "cwd": str(cwd),
            "is_real": is_real,
        }
        async with self._turn:
            self._child.stdin.write(json.dumps(asked).encode() + b"\n")
            process = Process(kind, await self._answers.get(), log)
            self._processes[process.pid] = process
        return process

    async def close(self) -> None:
        self._reading.cancel()
        assert self._child.stdin
        self._child.stdin.close()
        await self._child.wait()


Handler = Callable[[str], Awaitable[str]]


class Cluster:
    """Keeps services running from one episode to the next. `on_event` receives an event at the gate and answers it.

    With `is_real`, the services are those of a user instead of toys: vLLM and two ranks of FSDP, on CPU.
    """

    def __init__(self, directory: Path, *, is_real: bool = False):
        self.directory, self.is_real = directory, is_real
        self.zygote = Zygote()
        self.processes: dict[str, Process] = {}
        self.proxies: dict[str, Proxy] = {}
        self.addresses: dict[str, str] = {}
        """Those of the proxies."""
        self.direct: dict[str, str] = {}
        self.on_event: Handler | None = None
        self.events: Counter[str] = Counter()
        self.gate = directory / "gate"
        self.num_restarts = 0
        self._begins: dict[str, int] = {}
        self._keeping: list[asyncio.Task[None]] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Cluster"]:
        """Runs all services inside the `with` block."""
        server = await asyncio.start_unix_server(self._at_gate, self.gate)
        await self.zygote.start(self.directory / "zygote.log")
        try:
            for name in SERVICES:
                port = free_port()
                self.proxies[name], self.direct[name] = Proxy(port), f"127.0.0.1:{port}"
                self.addresses[name] = await self.proxies[name].start()
                self._keeping.append(asyncio.create_task(self._keep(name, port)))
            await self.until_ready()
            yield self
        finally:
            for task in self._keeping:
                task.cancel()
            await asyncio.gather(*self._keeping, return_exceptions=True)
            for process in self.processes.values():
                process.signal(signal.SIGKILL)
            await self.zygote.close()
            for proxy in self.proxies.values():
                await proxy.close()
            server.close()

    async def _keep(self, name: str, port: int) -> None:
        """Starts a service whenever it has ended, as an orchestrator does."""
        while True:
            log = self.directory / f"{name}.log"
            before = log.stat().st_size if log.exists() else 0
            args = ["--listen", f"127.0.0.1:{port}"]
            self._begins[name] = before
            self.processes[name] = await self.zygote.fork(
                name, args, log, self.gate, self.directory, is_real=self.is_real
            )
            await self.processes[name].ended.wait()
            self.num_restarts += 1

    async def until_ready(self) -> None:
        """Waits until every service listens."""
        async with asyncio.timeout(_START_S * (5 if self.is_real else 1)):
            for name in SERVICES:
                while not self._listens(name):
                    await asyncio.sleep(0.01)

    async def open_runs(self) -> list[str]:
        """Returns a line for each service that has a run open or does not answer."""
        held = []
        for name in SERVICES:
            stub, method, request = _ASKING[name.partition("-")[0]]
            client = Client(self.direct[name], stub, is_alone=True)
            try:
                info = (await client.call(method, request, timeout_s=_ANSWER_S)).info
                held += [f"{name} has {info.run_id} open"] if info.state != "idle" else []
            except LockstepError as error:
                held.append(f"{name} does not answer: {error.message}")
            finally:
                await client.close()
        return held

    def _listens(self, name: str) -> bool:
        process = self.processes.get(name)
        if process is None or process.code is not None or not process.log.exists():
            return False
        with process.log.open("rb") as log:
            log.seek(self._begins[name])
            return b"listens on" in log.read()

    async def _at_gate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        event = (await reader.readline()).decode().strip()
        self.events[event] += 1
        answer = await self.on_event(event) if self.on_event else "go"
        writer.write(f"{answer}\n".encode())
        writer.close()

    def pid_of(self, victim: str) -> int | None:
        """Returns the process id of a service or of a process that it has started; None if it is not running now."""
        service, wanted = _BELOW.get(victim, (victim, ""))
        process = self.processes.get(service)
        if process is None or process.code is not None:
            return None
        if service == "trainer" and self.is_real:  # the service is a process that starts the ranks in their order
            return dict(enumerate(descendants(process.pid))).get(0 if victim == "trainer" else 1)
        if victim not in _BELOW:
            return process.pid
        below = descendants(process.pid)
        return next((pid for pid, command in below.items() if re.search(wanted, command)), None)

    def engines(self) -> list[str]:
        """Returns the command lines of all engines."""
        replicas = [self.processes[name].pid for name in ("rollout-0", "rollout-1")]
        below = [command for pid in replicas for command in descendants(pid).values()]
        return [command for command in below if re.search(_ENGINE, command)]
