"""One program in a sandbox of its own: bubblewrap, rlimits and a system call filter.

Closed to it: the network, every file but Python's own and the C libraries, all processes but its own, the environment,
and our user id where the service runs as root. Its only writable place is a small /tmp in memory that vanishes with it.
There is no way to run a program without all of that: what bwrap or the kernel refuses is an error.
"""

import asyncio
import contextlib
import json
import math
import os
import py_compile
import shutil
import signal
import sys
import sysconfig
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.reward.scorers.base import FailureReason, ScoringError
from services.reward.seccomp import filter_program

START_TIMEOUT_S = 30.0
"""For bwrap and the interpreter, about 30 ms on an idle machine."""
REPLY_GRACE_S = 5.0
"""For the reply after a test's own time limit, which the harness keeps."""
_NOBODY = 65534
PYTHON = str(Path(sys._base_executable).resolve())
"""The interpreter that the virtual environment is made of."""
_HARNESS = Path(__file__).with_name("harness.py")
_NOT_NEEDED = shutil.ignore_patterns("site-packages", "test", "idlelib", "tkinter", "ensurepip", "config-*")
_PROBE = "import socket\ntry: socket.socket()\nexcept PermissionError: print('closed')"


@dataclass(frozen=True)
class Limits:
    """What one program may use. Memory is that of one process; all of its processes share the disk, which is memory."""

    timeout_s: float
    memory_bytes: int
    disk_bytes: int
    max_processes: int
    max_output_bytes: int

    @property
    def rlimits(self) -> dict[str, int]:
        """By the names of setrlimit(2). A test's wall-clock limit comes first; that of CPU time is its backstop."""
        return {
            "RLIMIT_CPU": math.ceil(self.timeout_s) + 1,
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_NPROC": self.max_processes + 1,  # and the harness
            "RLIMIT_FSIZE": self.disk_bytes,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_CORE": 0,
            "RLIMIT_MSGQUEUE": 0,
            "RLIMIT_MEMLOCK": 0,
        }


class Sandbox:
    """Runs programs, each in a sandbox of its own. `open` it first, `close` it always."""

    def __init__(self, limits: Limits):
        self._limits = limits
        self._files = contextlib.ExitStack()
        self._arguments: list[str] = []
        self._is_root = os.getuid() == 0

    async def open(self) -> None:
        """Makes one sandbox to see that it can be made.

        Raises:
            ScoringError: It cannot; says what to install or allow.
        """
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise ScoringError(FailureReason.ERROR, "bwrap not found: install bubblewrap (apt-get install bubblewrap)")
        folder = Path(self._files.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-sandbox-")))
        folder.chmod(0o755)
        py_compile.compile(str(_HARNESS), cfile=str(folder / "harness.pyc"), doraise=True)
        source = await asyncio.to_thread(self._readable, prefix := Path(sys.base_prefix), folder)
        self._arguments = [*self._as_nobody(), bwrap, *_bwrap_arguments(source, prefix, self._limits.disk_bytes)]
        self._arguments += ["--ro-bind", str(folder / "harness.pyc"), "/harness.pyc", "--remount-ro", "/"]
        async with self.run(_PROBE, [{"kind": "stdin", "input": ""}]) as replies:
            outputs = [output async for output in replies]
        if outputs != ["closed\n"]:
            raise ScoringError(FailureReason.ERROR, f"a sandbox does not do what it must: {outputs}")

    def close(self) -> None:
        """Removes what `open` made. Programs that run end with their caller."""
        self._files.close()

    @contextlib.asynccontextmanager
    async def run(
        self, program: str, tests: Sequence[dict[str, Any]], setup: str = ""
    ) -> AsyncIterator[AsyncIterator[str | None]]:
        """The outputs of `program` in `tests` (see harness.py), in order; None where it failed, hung or broke a limit.

        All of its processes have ended when the context has, however it is left.

        Raises:
            ScoringError: The sandbox did not start.
        """
        limits = self._limits
        lines = [json.dumps(test).encode() for test in tests]
        job = {"program": program, "setup": setup, "test_sizes": [len(line) for line in lines]}
        job |= {"timeout_s": limits.timeout_s, "max_output_bytes": limits.max_output_bytes, "rlimits": limits.rlimits}
        process, info = await self._start(json.dumps(job).encode(), b"".join(lines))
        pidfd = None
        try:
            await _wait_until_ready(process)
            with contextlib.suppress(ProcessLookupError):  # it may have ended already
                pidfd = os.pidfd_open(json.loads(os.read(info, 4096))["child-pid"])
            async with contextlib.aclosing(_outputs(process, len(tests), limits.timeout_s + REPLY_GRACE_S)) as outputs:
                yield outputs
        finally:
            os.close(info)
            await _end(process, pidfd)

    async def _start(self, job: bytes, tests: bytes) -> tuple[asyncio.subprocess.Process, int]:
        """The bwrap process, and the end of the pipe on which it names the first process of its namespace."""
        info, info_write = os.pipe()
        with contextlib.ExitStack() as files:
            files.callback(os.close, info_write)
            job_file, tests_file, filter_file = (_memory_file(data, files) for data in (job, tests, filter_program()))
            harness = [PYTHON, "-S", "-s", "-P", "-B", "-X", "utf8", "/harness.pyc", str(job_file), str(tests_file)]
            try:
                process = await asyncio.create_subprocess_exec(
                    *[*self._arguments, "--seccomp", str(filter_file), "--info-fd", str(info_write), "--", *harness],
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    limit=6 * self._limits.max_output_bytes + 4096,  # JSON writes a control character as six
                    pass_fds=(job_file, tests_file, filter_file, info_write),
                    start_new_session=True,
                    cwd="/",
                    env={},
                )
            except BaseException as error:
                os.close(info)
                if isinstance(error, OSError):
                    raise ScoringError(FailureReason.ERROR, f"bwrap does not start: {error}") from error
                raise
        return process, info

    def _as_nobody(self) -> list[str]:
        """A root user's processes are exempt from RLIMIT_NPROC, in user namespaces too.

        Not by subprocess's own `user`, for which it forks where it otherwise does not: gRPC's handlers would run.
        """
        if not self._is_root:
            return []
        setpriv = shutil.which("setpriv")
        if setpriv is None:
            raise ScoringError(FailureReason.ERROR, "setpriv not found: install util-linux, or do not run as root")
        return [setpriv, f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups", "--"]

    def _readable(self, prefix: Path, folder: Path) -> Path:
        """The interpreter's directory, or links to what is needed of it if it is in root's private directory."""
        if not self._is_root or all(path.stat().st_mode & 0o001 for path in (prefix, *prefix.parents)):
            return prefix
        standard = Path(sysconfig.get_path("stdlib"))
        for file in (Path(PYTHON), *prefix.glob("lib/libpython*.so*")):
            (folder / file.relative_to(prefix)).parent.mkdir(exist_ok=True)
            _link(file, folder / file.relative_to(prefix))
        shutil.copytree(standard, folder / standard.relative_to(prefix), ignore=_NOT_NEEDED, copy_function=_link)
        return folder


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def _bwrap_arguments(source: Path, prefix: Path, disk_bytes: int) -> list[str]:
    """All but the filter: namespaces, no capabilities, and a root with nothing in it but Python and the C libraries."""
    arguments = ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    # The harness is process 1: no process in there can kill, stop or outlive it.
    arguments += ["--as-pid-1"]
    arguments += ["--uid", "1000", "--gid", "1000", "--hostname", "sandbox", "--clearenv"]
    arguments += ["--setenv", "PYTHONHASHSEED", "0"]  # the same program gives the same output
    for path in map(Path, ("/usr/lib", "/usr/lib64", "/lib", "/lib64")):
        if path.is_symlink():
            arguments += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            arguments += ["--ro-bind", str(path), str(path)]
    arguments += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    # The stdlib of a distribution's Python is in /usr/lib already; others have a prefix of their own.
    arguments += ["--ro-bind", str(source / "bin" / Path(PYTHON).name), PYTHON]
    if not prefix.joinpath("lib").samefile("/usr/lib"):
        arguments += ["--ro-bind", str(source / "lib"), str(prefix / "lib")]
    for device in ("/dev/null", "/dev/zero", "/dev/urandom"):
        arguments += ["--dev-bind", device, device]
    arguments += ["--size", str(disk_bytes), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    return arguments


def _memory_file(data: bytes, files: contextlib.ExitStack) -> int:
    """A descriptor to read `data` from."""
    file = files.enter_context(os.fdopen(os.memfd_create("sandbox"), "r+b"))
    file.write(data)
    file.seek(0)
    return file.fileno()


async def _wait_until_ready(process: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            if await process.stdout.readline():
                return
            error = (await process.stderr.read()).decode(errors="replace").strip()[-500:]
    except TimeoutError:
        error = f"not ready within {START_TIMEOUT_S:g} s"
    hint = "bubblewrap 0.7 or newer must be allowed to make user, mount, process and network namespaces"
    raise ScoringError(FailureReason.ERROR, f"no sandbox: {error}; {hint}")


async def _outputs(process: asyncio.subprocess.Process, count: int, timeout_s: float) -> AsyncIterator[str | None]:
    """None for all that is missing or unreadable: after the start, that is the program's doing."""
    for _ in range(count):
        try:
            async with asyncio.timeout(timeout_s):
                output = json.loads(await process.stdout.readline())["output"]
        except (TimeoutError, ValueError, KeyError, TypeError, RecursionError):
            output, timeout_s = None, 0
        yield output if isinstance(output, str) else None


async def _end(process: asyncio.subprocess.Process, pidfd: int | None) -> None:
    """Kills the first process of the namespace, and with it the kernel kills all others; waits until they are gone."""
    with contextlib.suppress(ProcessLookupError):
        if pidfd is None:
            process.kill()  # --die-with-parent does the rest
        else:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)  # bwrap itself lives on to reap it
    if pidfd is not None:
        os.close(pidfd)
    await process.communicate()
