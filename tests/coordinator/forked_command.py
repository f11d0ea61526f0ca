"""Starts `lockstep` commands as forks of one process that has imported what they need, which takes 3 s of CPU time."""

import asyncio
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

_MODULES = (
    "services.common.config.load",
    "services.common.config.run",
    "services.coordinator.cli.main",
    "services.coordinator.daemon.client",
    "services.coordinator.daemon.runs",
    "services.coordinator.observe.frontend",
    "services.coordinator.rl.session",
)
_NUMBER = struct.Struct("i")


class ForkedCommand:
    """A running command, as asyncio.subprocess.Process describes one; its output is read here if it has no files."""

    def __init__(self, pid: int, stdout: asyncio.StreamReader | None, stderr: asyncio.StreamReader | None):
        self.pid, self.stdout, self.stderr = pid, stdout, stderr
        self.returncode: int | None = None
        self._ending: asyncio.Task[int] | None = None

    @classmethod
    async def start(
        cls, *arguments: str, cwd: Path, stdout: int = subprocess.PIPE, stderr: int = subprocess.PIPE
    ) -> "ForkedCommand":
        """Runs `lockstep ARGUMENTS` in `cwd`, with output to these descriptors or to pipes."""
        with contextlib.ExitStack() as given:
            read: list[asyncio.StreamReader | None] = []
            files: list[int] = []
            for file in (stdout, stderr, subprocess.PIPE):  # the last one is for the pid and the exit code
                reader = None
                if file == subprocess.PIPE:
                    out, file = os.pipe()
                    given.callback(os.close, file)
                    reader = await _reading(out)
                read.append(reader)
                files.append(file)
            order = {"arguments": arguments, "cwd": str(cwd), "env": dict(os.environ)}
            socket.send_fds(_parent(), [json.dumps(order).encode()], files)
        status = read[2]
        assert status
        command = cls(_NUMBER.unpack(await status.readexactly(_NUMBER.size))[0], read[0], read[1])
        command._ending = asyncio.create_task(command._end(status))
        return command

    async def _end(self, status: asyncio.StreamReader) -> int:
        (self.returncode,) = _NUMBER.unpack(await status.readexactly(_NUMBER.size))
        return self.returncode

    async def wait(self) -> int:
        assert self._ending
        return await asyncio.shield(self._ending)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


async def _reading(descriptor: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(descriptor, "rb", 0))
    return reader


_sockets: list[socket.socket] = []


def _parent() -> socket.socket:
    """Returns the socket of the process that forks, which ends when this process does."""
    if not _sockets:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.coordinator.forked_command", str(theirs.fileno())]
            # stdout is no terminal, as in the commands.
            subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        _sockets.append(ours)
    return _sockets[0]


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _next_command(orders: socket.socket) -> list[str] | None:
    """Forks for each order; returns its arguments in the new process, and None in this one when there are no more."""
    while True:
        message, files, _, _ = socket.recv_fds(orders, 1 << 20, 3)
        _reap()
        if not message:
            return None
        if not os.fork():
            break
        for file in files:
            os.close(file)
    orders.close()
    order = json.loads(message)
    stdout, stderr, status = files
    if pid := os.fork():  # between the two processes, because only a parent learns the exit code
        os.close(stdout)
        os.close(stderr)
        os.write(status, _NUMBER.pack(pid))
        os.write(status, _NUMBER.pack(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
        os._exit(0)
    os.close(status)
    for file, number in ((stdout, 1), (stderr, 2)):
        os.dup2(file, number)
        os.close(file)
    os.chdir(order["cwd"])
    sys.path[0] = order["cwd"]
    os.environ.clear()
    os.environ.update(order["env"])
    return order["arguments"]


def main(orders: int) -> None:
    from services.coordinator.compat.transformers import import_transformers

    import_transformers()
    for module in _MODULES:
        importlib.import_module(module)
    gc.freeze()
    arguments = _next_command(socket.socket(fileno=orders))
    if arguments is not None:
        sys.argv = ["lockstep", *arguments]
        runpy.run_module("services.coordinator", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
