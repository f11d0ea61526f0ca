"""Starts the `lockstep` command and services as forks of one process that has imported what they need.

The imports of the command take two seconds of processor time, and those of a service five to ten.
"""

import atexit
import json
import os
import signal
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

from services.common.forks import FORKABLE, service_environment, start_parent
from tests.e2e.forked.__main__ import COMMAND


class Forked:
    """A forked process, as subprocess.Popen describes one."""

    def __init__(self, forks: "_Forks", pid: int):
        self._forks, self.pid = forks, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        while self.returncode is None and self._forks.receive(0):
            pass
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._forks.receive(left):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Forks:
    """Gives orders to a process of services.common.forks, which ends when this one does."""

    def __init__(self) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 it is open for as long as this process
        self._forked: dict[int, Forked] = {}
        self._newest = 0
        self._socket, self._parent = start_parent(self._output)
        atexit.register(self.close)

    def close(self) -> None:
        self._socket.close()
        self._parent.wait()

    def preload(self, module: str) -> None:
        self._socket.send(json.dumps({"module": module}).encode())

    def start(self, arguments: list[str], log: Path) -> Forked:
        env = service_environment()
        if arguments[2] in FORKABLE:
            self.preload(arguments[2])
        order = {"module": "tests.e2e.forked", "args": arguments, "log": str(log.absolute()), "env": env}
        self._socket.send(json.dumps(order).encode())
        self._newest = 0
        while not self._newest:
            self.receive(None)
        return self._forked[self._newest]

    def receive(self, timeout_s: float | None) -> bool:
        """Waits for a message, and returns whether one has come."""
        self._socket.settimeout(timeout_s)
        try:
            message = self._socket.recv(1 << 16)
        except (BlockingIOError, TimeoutError):
            return False
        finally:
            self._socket.settimeout(None)
        if not message:
            self._output.seek(0)
            raise AssertionError(f"the process of the imports has ended:\n{self._output.read().decode()}")
        answer = json.loads(message)
        if "code" in answer:
            self._forked.pop(answer["pid"]).returncode = answer["code"]
        else:
            self._newest = answer["pid"]
            self._forked[self._newest] = Forked(self, self._newest)
        return True


_forks = cache(_Forks)


def preload(service: str) -> None:
    """Imports what `service` needs, which commands and services that start one share with it."""
    _forks().preload(service)


def start_command(arguments: list[str], directory: Path, errors: Path, output: Path | None = None) -> Forked:
    """Runs `lockstep ARGUMENTS` in `directory`. Its output goes to that file, or to that of its errors."""
    at = "" if output is None else str(output.absolute())
    return _forks().start([str(directory.absolute()), at, COMMAND, *arguments], errors)


def start_service(module: str, arguments: list[str], log: Path) -> Forked:
    """Runs `python -m MODULE ARGUMENTS` in the current directory; the log gets its output."""
    return _forks().start([os.getcwd(), "", module, *arguments], log)
