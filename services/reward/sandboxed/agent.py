"""Runs an agent's program as the first process of a sandbox, which has no network but its own loopback.

A socket that listens at PORT there is handed to the service, which answers. Once the program has ended, or input has,
all other processes are killed, and the result is written: its exit code, what it printed, and the files to collect.
"""

import asyncio
import base64
import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

PORT = 8000
WORKSPACE, HOME = "/workspace", "/home/agent"
MAX_TEXT_BYTES = 1 << 20
ENDED = -9  # exit code of a program that was killed because input had ended
_TAIL_BYTES = 4096
_CHUNK = 1 << 16
_PR_SET_DUMPABLE = 4

Job = dict[str, Any]


def main(job_file: int, result_file: int, line: int) -> None:
    """Sends the socket through `line`, runs the program of the job and writes the result, a JSON object."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)  # the program has the same user, and must not read this memory
    # The only signal that the program could end process 1 with, as `pkill -INT python` would.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(job_file, "rb") as file:
        job = json.load(file)
    with socket.create_server(("127.0.0.1", PORT), backlog=128) as server, socket.socket(fileno=line) as service:
        socket.send_fds(service, [b"."], [server.fileno()])
    result = asyncio.run(_run(job))
    with os.fdopen(result_file, "wb") as file:
        file.write(json.dumps(result).encode())


class _Child:
    """A program. As the first process, this one also reaps the processes that others leave behind."""

    def __init__(self, command: list[str], job: Job):
        def limit() -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            for name, value in job["rlimits"].items():
                resource.setrlimit(getattr(resource, name), (value, value))

        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=WORKSPACE,
            env=job["env"],
            start_new_session=True,
            preexec_fn=limit,
        )
        assert self._process.stdout and self._process.stderr, "they are pipes"
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.text, self.errors = bytearray(), bytearray()
        self._reading = [
            asyncio.create_task(_read(self._process.stdout, self.text, MAX_TEXT_BYTES)),
            asyncio.create_task(_read(self._process.stderr, self.errors, _TAIL_BYTES)),
        ]
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap_children)
        self._reap_children()  # it may have ended already

    async def end(self) -> None:
        """Kills all other processes of the sandbox, and reads what they have printed."""
        while True:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                break
        await asyncio.gather(*self._reading)

    def _reap_children(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if pid == self._process.pid and not self.ended.done():
                    self._process.returncode = os.waitstatus_to_exitcode(status)  # so that Popen waits for it no more
                    self.ended.set_result(self._process.returncode)


_SILENT = "its standard error is empty"


async def _run(job: Job) -> Job:
    stopped = asyncio.create_task(_read(os.fdopen(os.dup(0), "rb"), bytearray(), 1))  # ends with the input
    try:
        for name, content in job["files"].items():
            path = Path(HOME, name[2:]) if name.startswith("~/") else Path(WORKSPACE, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(base64.b64decode(content))
        if job["setup"]:
            code, _, errors = await _execute(job["setup"], job, stopped)
            if code:
                return {"error": f"setup ended with exit code {code}: {errors or _SILENT}"}
        code, text, errors = await _execute(job["command"], job, stopped)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the command
        return {"error": f"{type(error).__name__}: {error}"}
    if code < 0 and not stopped.done():
        return {"error": f"the program was ended by signal {-code}: {errors or _SILENT}"}
    files = dict(_collect(job["collect"], job["max_files_bytes"]))
    return {"exit_code": code, "text": text, "errors": errors, "files": files}


async def _execute(command: list[str], job: Job, stopped: "asyncio.Task[None]") -> tuple[int, str, str]:
    child = _Child(command, job)
    await asyncio.wait({child.ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
    code = child.ended.result() if child.ended.done() else ENDED
    await child.end()
    return code, child.text.decode(errors="replace"), child.errors.decode(errors="replace")


async def _read(pipe: Any, into: bytearray, num_kept: int) -> None:
    """Reads all of a pipe, and keeps its last bytes."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    while data := await reader.read(_CHUNK):
        into += data
        del into[:-num_kept]


def _collect(patterns: list[str], max_bytes: int) -> Iterator[tuple[str, str]]:
    """Yields the regular files that match, in the order of their paths, as long as they fit into `max_bytes`."""
    # Until Python 3.13, a last ** is directories only.
    globs = [f"{pattern}/*" if PurePath(pattern).name == "**" else pattern for pattern in patterns]
    paths = set[Path]()
    for pattern in globs:
        with contextlib.suppress(OSError, RecursionError):  # directories can be nested deeper than ** can look
            paths.update(Path(WORKSPACE).glob(pattern))
    for path in sorted(paths):
        name = str(path.relative_to(WORKSPACE))
        with contextlib.suppress(OSError, UnicodeEncodeError):
            name.encode()
            if not stat.S_ISREG(path.lstat().st_mode):
                continue
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                content = file.read(max_bytes + 1)
            if len(content) <= max_bytes:
                max_bytes -= len(content)
                yield name, base64.b64encode(content).decode()
