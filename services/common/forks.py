"""Starts services as forks of one process that has imported torch, transformers and vLLM once for all of them.

On two cores the imports of a trainer and two replicas take 40 s of processor time, and forks share them. A service that
is started again finds them made.
"""

import asyncio
import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import IO, Self

from services.common.errors import Reason, Unavailable
from services.common.process import may_fork

FORKABLE = ("services.trainer", "services.rollout")
"""What can be forked: the module `__main__` of each has `preload()`, which imports what the service needs, and
`main()`."""
_MESSAGE_BYTES = 65_536
_LINES = 15
_EXIT_S = 5.0  # in which a process that has failed ends


class Forked:
    """A forked process, as asyncio.subprocess.Process describes one."""

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None
        self.why = ""
        """Why it counts as killed, although nothing may have killed it: how the process of the imports has ended."""
        self._has_ended = asyncio.Event()

    def end(self, code: int) -> None:
        self.returncode = code
        self._has_ended.set()

    def kill(self) -> None:
        """Kills its process session, and tells its end once it is gone, without its parent."""
        for kill in (os.killpg, os.kill):  # one that has just begun may have no session yet
            with contextlib.suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)
        try:
            alive = os.pidfd_open(self.pid)
        except ProcessLookupError:
            self.end(-signal.SIGKILL)
            return
        loop = asyncio.get_running_loop()

        def on_gone() -> None:
            loop.remove_reader(alive)
            os.close(alive)
            self.end(-signal.SIGKILL)

        loop.add_reader(alive, on_gone)

    async def wait(self) -> int:
        """Returns the exit code, or minus the signal that ended the process."""
        await self._has_ended.wait()
        assert self.returncode is not None
        return self.returncode


def start_parent(output: IO[bytes]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Starts the process that is forked, with its output to a file; returns the socket for orders to it."""
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with other:
        parent = subprocess.Popen(
            [sys.executable, "-m", "services.common.forks", str(other.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C reaches the coordinator alone
            pass_fds=(other.fileno(),),
            env=service_environment(),
        )
    return own, parent


class Forks:
    """Starts services as forks of a process, which is started when it is needed, and again if it has died.

    It is a context manager. At the end of its block the process ends, but no service does.
    """

    def __init__(self) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 closed with the block
        self._parent: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._asked = deque[asyncio.Future[Forked]]()
        self._forked = dict[int, Forked]()

    async def start(self, module: str, args: Sequence[str], log_path: Path, env: Mapping[str, str]) -> Forked:
        """Runs `python -m module args` in a new process session, with output to a log and these environment variables.

        Raises:
            Unavailable: SERVICE_DIED if the imports fail, with the last lines of their output.
        """
        asked = asyncio.get_running_loop().create_future()
        self._asked.append(asked)
        self._send_order(_Order(module, list(args), str(log_path), dict(env)))
        return await asked

    def preload(self, module: str) -> None:
        """Begins to import what a service needs, before it is started."""
        self._send_order(_Order(module))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._hang_up():
            process.end(-signal.SIGKILL)
        self._output.close()

    def _send_order(self, order: "_Order") -> None:
        self._socket = self._socket or self._open()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the end of its parent is noticed below
            self._socket.send(json.dumps(asdict(order)).encode())

    def _open(self) -> socket.socket:
        own, self._parent = start_parent(self._output)
        own.setblocking(False)
        asyncio.get_running_loop().add_reader(own, self._receive)
        return own

    def _receive(self) -> None:
        assert self._socket is not None
        try:
            message = self._socket.recv(_MESSAGE_BYTES)
        except ConnectionResetError:
            message = b""
        if not message:
            for process in self._hang_up(_EXIT_S):
                process.kill()  # one that is started in its place needs its port and its memory
            return
        answer = json.loads(message)
        if "code" in answer:
            self._forked.pop(answer["pid"]).end(answer["code"])
            return
        process = self._forked[answer["pid"]] = Forked(answer["pid"])
        asked = self._asked.popleft()
        if asked.cancelled():
            os.kill(process.pid, signal.SIGKILL)
        else:
            asked.set_result(process)

    def _hang_up(self, patience_s: float = 0.0) -> list[Forked]:
        """Ends the process that forks. Returns its forks, whose end nobody is left to notice."""
        if self._socket is None or self._parent is None:
            return []
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may be importing
            self._parent.wait(patience_s)
        self._parent.kill()
        code = self._parent.wait()
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self._socket = None
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").splitlines()[-_LINES:]
        message = "\n".join(["the process that imports the packages of trainer and rollout has ended:", *lines])
        orphans = list(self._forked.values())
        for process in orphans:
            process.why = message if code != -signal.SIGKILL else ""
        self._forked.clear()
        while self._asked:
            asked = self._asked.popleft()
            if not asked.cancelled():
                asked.set_exception(Unavailable(message, reason=Reason.SERVICE_DIED, service="imports"))
        return orphans


def service_environment() -> dict[str, str]:
    """Returns the environment variables of a service that is started here."""
    # Some containers set this. Every start would compile all modules of torch and vLLM again, for 10 s.
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


@dataclass(frozen=True)
class _Order:
    """Asks for a fork that runs `python -m module args`; without a `log` only to import what the module needs."""

    module: str
    args: list[str] = field(default_factory=list[str])
    log: str = ""
    env: dict[str, str] = field(default_factory=dict[str, str])

    def become(self, environment: Mapping[str, str]) -> None:
        """Gives this process what the ordered one would have; `environment` is that of the parent's start."""
        from setproctitle import setproctitle  # a package of the extras trainer and rollout

        command = [sys.executable, "-m", self.module, *self.args]
        setproctitle(" ".join(command))  # before the environment changes, behind whose first place it writes
        os.setsid()
        os.environ.clear()
        os.environ.update({**environment, **self.env})
        tempfile.tempdir = None  # TMPDIR may be another than that of the imports
        with open(self.log, "ab") as log:
            os.dup2(log.fileno(), sys.stdout.fileno())
            os.dup2(log.fileno(), sys.stderr.fileno())
        if not may_fork():  # an import has initialized CUDA
            os.execv(sys.executable, command)
        sys.argv = [self.module, *self.args]


class _Parent:
    """Serves orders until the coordinator closes its end of the socket."""

    def __init__(self, orders: socket.socket):
        self._orders, self._environment = orders, dict(os.environ)
        os.environ["HF_HUB_OFFLINE"] = "1"  # services read local files only
        self._pids = dict[int, int]()  # descriptor of a forked process -> its id
        self._poller = select.poll()
        self._poller.register(orders, select.POLLIN)

    def serve(self) -> Callable[[], None] | None:
        """Returns, in each fork, what it is to run; in the parent None, at the end."""
        while True:
            for descriptor, _ in self._poller.poll():
                if descriptor in self._pids:
                    self._report_end(descriptor)
                    continue
                message = self._orders.recv(_MESSAGE_BYTES)
                if not message:
                    return None
                if run := self._execute(_Order(**json.loads(message))):
                    return run

    def _execute(self, order: _Order) -> Callable[[], None] | None:
        """Returns what to run if this is the fork."""
        module = import_module(f"{order.module}.__main__")
        module.preload()
        if not order.log:
            return None
        pid = os.fork()
        if pid == 0:
            for inherited in (self._orders.detach(), *self._pids):
                os.close(inherited)
            order.become(self._environment)
            return module.main
        descriptor = os.pidfd_open(pid)
        self._pids[descriptor] = pid
        self._poller.register(descriptor, select.POLLIN)
        self._answer({"pid": pid})
        return None

    def _report_end(self, descriptor: int) -> None:
        """Tells how a forked process has ended."""
        self._poller.unregister(descriptor)
        os.close(descriptor)
        pid = self._pids.pop(descriptor)
        _, status = os.waitpid(pid, 0)
        self._answer({"pid": pid, "code": os.waitstatus_to_exitcode(status)})

    def _answer(self, answer: Mapping[str, int]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # then the next message is empty
            self._orders.send(json.dumps(answer).encode())


def main() -> None:
    """Serves the orders that come through the socket with this descriptor."""
    code: int | None = None

    def end() -> None:
        if code is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    # It is called after all that is registered later. The interpreter would take apart what was imported then, which
    # copies the memory that forks share, for up to 3 s of processor time.
    atexit.register(end)
    try:
        if run := _Parent(socket.socket(fileno=int(sys.argv[1]))).serve():
            run()
        code = 0
    except SystemExit as error:
        code = error.code or 0 if isinstance(error.code, int | None) else None  # a text is printed by the interpreter
        raise


if __name__ == "__main__":
    main()
