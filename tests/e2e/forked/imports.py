"""Gives the runs of forked commands the imports of this process for the services that they start."""

import os
import select
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from services.common import forks
from services.coordinator.fleet import launch
from services.reward import __main__ as reward


class _Waiting:
    """A process that becomes one of services.common.forks if it is told to, and ends otherwise.

    It is forked before the command has any thread.
    """

    def __init__(self) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            self._socket.close()
            _become(other)
        other.close()

    def start(self, orders: int, output: int) -> None:
        socket.send_fds(self._socket, [b"start"], [orders, output])
        self._socket.close()

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            poller, descriptor = select.poll(), os.pidfd_open(self.pid)
            poller.register(descriptor, select.POLLIN)
            has_ended = poller.poll(None if timeout is None else 1000 * timeout)
            os.close(descriptor)
            if not has_ended:
                raise subprocess.TimeoutExpired("the imports", timeout or 0)
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def kill(self) -> None:
        if self._code is None:
            os.kill(self.pid, 9)


def _become(other: socket.socket) -> None:
    message, descriptors, *_ = socket.recv_fds(other, 16, 2)
    if not message:
        os._exit(0)
    orders, output = descriptors
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    other.close()
    sys.argv = ["forks", str(orders)]
    forks.main()
    sys.exit()


def lend() -> None:
    """Lets the next services.common.forks.Forks of this process fork services from what it has imported until now.

    The reward service, which is started as a new process otherwise, is a fork too.
    """
    reward.preload = lambda: None  # type: ignore[attr-defined]
    launch.FORKABLE = (*forks.FORKABLE, "services.reward")
    waiting = [_Waiting()]

    def popen(*command: Any, **settings: Any) -> Any:
        if not waiting:  # the first has died
            return subprocess.Popen(*command, **settings)
        process = waiting.pop()
        process.start(*settings["pass_fds"], settings["stdout"].fileno())
        return process

    names = {"DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired}
    forks.subprocess = SimpleNamespace(Popen=popen, **names)  # type: ignore[assignment]
