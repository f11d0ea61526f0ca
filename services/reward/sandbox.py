"""Runs each program in a sandbox of its own: bubblewrap, rlimits and a system call filter.

A program has no access to the network, to files other than Python's own and the C libraries, to processes other than
its own, or to the environment. If the service runs as root, the program runs under another user id. The only writable
place is a small /tmp in memory, which is removed with the sandbox. A program is never run without all of that: if bwrap
or the kernel refuses any of it, that is an error.
"""

import asyncio
import contextlib
import errno
import json
import math
import os
import platform
import py_compile
import re
import shutil
import signal
import struct
import sys
import sysconfig
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.reward.errors import FailureReason, ScoringError

# linux/audit.h, and the numbers of asm/unistd_64.h and asm-generic/unistd.h.
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_DENIED = {
    "x86_64": {
        "shmget": 29, "shmat": 30, "socket": 41, "semget": 64, "msgget": 68, "ptrace": 101, "syslog": 103,
        "personality": 135, "modify_ldt": 154, "pivot_root": 155, "chroot": 161, "acct": 163, "mount": 165,
        "umount2": 166, "swapon": 167, "reboot": 169, "init_module": 175, "delete_module": 176, "quotactl": 179,
        "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "vmsplice": 278, "unshare": 272,
        "perf_event_open": 298, "fanotify_init": 300, "name_to_handle_at": 303, "open_by_handle_at": 304,
        "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313,
        "memfd_create": 319, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323, "mq_open": 240,
    },
    "aarch64": {
        "shmget": 194, "shmat": 196, "socket": 198, "semget": 190, "msgget": 186, "ptrace": 117, "syslog": 116,
        "personality": 92, "pivot_root": 41, "chroot": 51, "acct": 89, "mount": 40,
        "umount2": 39, "swapon": 224, "reboot": 142, "init_module": 105, "delete_module": 106, "quotactl": 60,
        "kexec_load": 104, "add_key": 217, "request_key": 218, "keyctl": 219, "vmsplice": 75, "unshare": 97,
        "perf_event_open": 241, "fanotify_init": 262, "name_to_handle_at": 264, "open_by_handle_at": 265,
        "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "finit_module": 273,
        "memfd_create": 279, "kexec_file_load": 294, "bpf": 280, "userfaultfd": 282, "mq_open": 180,
    },
}  # fmt: skip
# Numbers from 424 on are the same on all architectures: io_uring, open_tree to fspick, pidfd_getfd, mount_setattr,
# memfd_secret.
_DENIED_EVERYWHERE = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442, 443, 447)

_CLONE_NEW = 0x7E020000  # every CLONE_NEW* flag of clone: user, pid, net, ipc, uts, cgroup, mount
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16  # struct seccomp_data
_KILL, _ALLOW, _ERRNO = 0x80000000, 0x7FFF0000, 0x00050000
_X32 = 0x40000000


def filter_program(*, has_loopback: bool = False) -> bytes:
    """Returns the filter for this machine; with `has_loopback`, sockets of the Internet and of Unix are allowed.

    Raises:
        ScoringError: There is none for its architecture.
    """
    machine = platform.machine()
    if machine not in _DENIED:
        raise ScoringError(FailureReason.ERROR, f"no system call filter for {machine}: use x86_64 or aarch64")
    allowed = {"socket", "memfd_create"} if has_loopback else set()
    denied = (*(number for name, number in _DENIED[machine].items() if name not in allowed), *_DENIED_EVERYWHERE)
    only_families = [  # AF_UNIX, AF_INET and AF_INET6: AF_VSOCK would reach the host
        (_JUMP_EQUAL, 0, 6, _DENIED[machine]["socket"]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_JUMP_EQUAL, 3, 0, 1),
        (_JUMP_EQUAL, 2, 0, 2),
        (_JUMP_EQUAL, 1, 0, 10),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    instructions = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_JUMP_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
        # clone3 has its flags in memory, which a filter cannot read. With ENOSYS, libc falls back to clone.
        *_deny(_CLONE3, errno.ENOSYS),
        *(step for number in denied for step in _deny(number, errno.EPERM)),
        *(only_families if has_loopback else ()),
        (_JUMP_EQUAL, 0, 3, _CLONE[machine]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_JUMP_ANY_BIT, 0, 1, _CLONE_NEW),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)


def _deny(number: int, error: int) -> list[tuple[int, int, int, int]]:
    return [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | error)]


START_TIMEOUT_S = 30.0  # for bwrap and the interpreter, which take about 30 ms on an idle machine
REPLY_GRACE_S = 5.0  # in addition to a test's own time limit, which the harness enforces
_NOBODY = 65534
_CHILD = re.compile(rb'"child-pid": (\d+)')
# The interpreter that the virtual environment is based on.
PYTHON = str(Path(sys._base_executable).resolve())  # pyright: ignore[reportAttributeAccessIssue] not in typeshed
_ISOLATED = ("-S", "-s", "-P", "-B", "-X", "utf8")
_CODE = "/code"  # where the modules of services/reward/sandboxed are in the sandbox
_NOT_NEEDED = shutil.ignore_patterns("site-packages", "test", "idlelib", "tkinter", "ensurepip", "config-*")
Started = tuple[Process, int | None]
"""bwrap, and a pidfd of the first process of its namespace; None if that has ended."""
_PROBE = "import socket\ntry: socket.socket()\nexcept PermissionError: print('closed')"


@dataclass(frozen=True)
class Limits:
    """Limits one program. `memory_bytes` is per process; all its processes share the disk, which is in memory."""

    timeout_s: float
    memory_bytes: int
    disk_bytes: int
    max_processes: int
    max_output_bytes: int

    @property
    def rlimits(self) -> dict[str, int]:
        return {
            "RLIMIT_CPU": math.ceil(self.timeout_s) + 1,  # only backs up a test's wall-clock limit
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_NPROC": self.max_processes + 2,  # 2 more for the harness and the process of a script
            "RLIMIT_FSIZE": self.disk_bytes,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_CORE": 0,
            "RLIMIT_MSGQUEUE": 0,
            "RLIMIT_MEMLOCK": 0,
        }


class Sandbox:
    """Runs programs, each in a sandbox of its own. Call `open` first, and always call `close`."""

    _has_loopback = False

    def __init__(self, limits: Limits):
        self._limits = limits
        self._files = contextlib.ExitStack()
        self._arguments: list[str] = []
        self._is_root = os.getuid() == 0

    async def open(self) -> None:
        """Creates one sandbox. Raises ScoringError, which says what to install or allow, if this host cannot."""
        await self._prepare()
        async with self.run(_PROBE, [{"kind": "stdin", "input": ""}]) as replies:
            outputs = [output async for output in replies]
        if outputs != ["closed\n"]:
            raise ScoringError(FailureReason.ERROR, f"the sandbox does not block sockets: a probe printed {outputs}")

    async def _prepare(self, *more: str) -> None:
        """Makes the directory that sandboxes read, and their arguments, to which `more` are added."""
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise ScoringError(FailureReason.ERROR, "bwrap not found: install bubblewrap (apt-get install bubblewrap)")
        folder = Path(self._files.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-sandbox-")))
        folder.chmod(0o755)
        self.check_reachable(folder, "set TMPDIR to another directory")
        _compile(folder / "code")
        source = await asyncio.to_thread(self._readable, prefix := Path(sys.base_prefix), folder)
        for path in folder.rglob("*"):  # programs run as another user, whatever the umask; links keep their modes
            if path.is_dir():
                path.chmod(0o755)
            elif path.stat().st_nlink == 1:
                path.chmod(path.stat().st_mode | 0o444)
        self._arguments = [*self._as_nobody(), bwrap, *_bwrap_arguments(source, prefix, self._limits.disk_bytes)]
        self._arguments += ["--ro-bind", str(folder / "code"), _CODE, *more, "--remount-ro", "/"]

    def close(self) -> None:
        self._files.close()

    @contextlib.asynccontextmanager
    async def run(
        self, program: str, tests: Sequence[Mapping[str, object]], setup: str = ""
    ) -> AsyncIterator[AsyncIterator[str | None]]:
        """Yields the output of `program` in each test (see harness.py); None if it failed, hung or exceeded a limit.

        All of its processes have ended when the context exits, whatever the reason.

        Raises:
            ScoringError: The sandbox did not start.
        """
        limits = self._limits
        lines = [json.dumps(test).encode() for test in tests]
        job: dict[str, object] = {"program": program, "setup": setup, "test_sizes": [len(line) for line in lines]}
        job["scripts"] = [test["kind"] == "script" for test in tests]
        job |= {"timeout_s": limits.timeout_s, "max_output_bytes": limits.max_output_bytes, "rlimits": limits.rlimits}
        limit = 6 * limits.max_output_bytes + 4096  # JSON encodes a control character as 6 bytes
        with contextlib.ExitStack() as opened:  # closes the first if there is no descriptor for the second
            passed = [memory_file(data, opened) for data in (json.dumps(job).encode(), b"".join(lines))]
            files = opened.pop_all()
        async with self._started("harness", passed, files, stdin=DEVNULL, stdout=PIPE, limit=limit) as process:
            await _wait_until_ready(process)
            async with contextlib.aclosing(_outputs(process, len(tests), limits.timeout_s + REPLY_GRACE_S)) as outputs:
                yield outputs

    @contextlib.asynccontextmanager
    async def _started(
        self, module: str, passed: Sequence[int], files: contextlib.ExitStack, **streams: int
    ) -> AsyncIterator[Process]:
        """Runs `main` of a module of services/reward/sandboxed in a sandbox, with the descriptors `passed`.

        All of its processes have ended when the context exits. Closes `files`, which has these descriptors.
        """
        # A start is never canceled: asyncio would kill bwrap, but not its child.
        starting = asyncio.create_task(self._start(module, passed, files, **streams))
        try:
            yield (await asyncio.shield(starting))[0]
        finally:
            await asyncio.shield(asyncio.ensure_future(_end(starting)))

    async def _start(self, module: str, passed: Sequence[int], files: contextlib.ExitStack, **streams: Any) -> Started:
        with contextlib.ExitStack() as ours:
            try:
                with files:
                    info, info_write = os.pipe()
                    ours.callback(os.close, info)
                    files.callback(os.close, info_write)
                    filter_file = memory_file(filter_program(has_loopback=self._has_loopback), files)
                    process = await asyncio.create_subprocess_exec(
                        *[*self._arguments, "--seccomp", str(filter_file), "--info-fd", str(info_write), "--"],
                        *_python_call(module, *passed),
                        stderr=PIPE,
                        pass_fds=(*passed, filter_file, info_write),
                        start_new_session=True,
                        cwd="/",
                        env={},
                        **streams,
                    )
                return process, await asyncio.to_thread(_first_process, info)
            except OSError as error:
                raise ScoringError(FailureReason.ERROR, f"bwrap does not start: {error}") from error

    def _as_nobody(self) -> list[str]:
        """Returns a command prefix that drops root, because RLIMIT_NPROC does not limit root, even in user namespaces.

        The `user` argument of subprocess is not used, because it forces a fork, which would run gRPC's fork handlers.
        """
        if not self._is_root:
            return []
        setpriv = shutil.which("setpriv")
        if setpriv is None:
            raise ScoringError(FailureReason.ERROR, "setpriv not found: install util-linux, or do not run as root")
        return [setpriv, f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups", "--"]

    def check_reachable(self, path: Path, fix: str) -> None:
        """Raises ScoringError, with what to do, if the user that programs run as cannot reach a path."""
        if (closed := self._closed(path)) is not None:
            reason = f"this service runs as root, so programs run as nobody, which cannot reach {path}"
            raise ScoringError(FailureReason.ERROR, f"{reason}: {fix}, or run chmod o+x {closed}")

    def _closed(self, path: Path) -> Path | None:
        """Returns the first directory on the way to a path that others than root cannot enter, if programs are others.

        Missing paths are left to bwrap.
        """
        way = [*reversed(path.resolve().parents), path.resolve()] if self._is_root and path.exists() else []
        return next((part for part in way if part.is_dir() and not part.stat().st_mode & 0o001), None)

    def _readable(self, prefix: Path, folder: Path) -> Path:
        """Returns the interpreter's directory, or links to the needed files if others than root cannot read it."""
        if self._closed(prefix) is None:
            return prefix
        standard = Path(sysconfig.get_path("stdlib"))
        for file in (Path(PYTHON), *prefix.glob("lib/libpython*.so*")):
            (folder / file.relative_to(prefix)).parent.mkdir(exist_ok=True)
            _place_copy(file, folder / file.relative_to(prefix))
        shutil.copytree(standard, folder / standard.relative_to(prefix), ignore=_NOT_NEEDED, copy_function=_place_copy)
        return folder


def _python_call(module: str, *files: int) -> list[str]:
    source = f"services.reward.sandboxed.{module}"
    begin = f"import sys; sys.path.insert(0, {_CODE!r}); from {source} import main; del sys.path[0]; "
    return [PYTHON, *_ISOLATED, "-c", f"{begin}main({', '.join(map(str, files))})"]


def _compile(folder: Path) -> None:
    """Compiles the modules that run inside, below their names, into `folder`."""
    package = folder / "services" / "reward" / "sandboxed"
    package.mkdir(parents=True)
    for module in Path(__file__).with_name("sandboxed").glob("*.py"):
        py_compile.compile(str(module), cfile=str(package / f"{module.stem}.pyc"), doraise=True)
    for parent in (package.parent, package.parent.parent):
        shutil.copy(package / "__init__.pyc", parent)


def _place_copy(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def _bwrap_arguments(source: Path, prefix: Path, disk_bytes: int) -> list[str]:
    """Returns bwrap's arguments except the filter's.

    They give the program new namespaces, no capabilities, and a root directory with only Python and the C libraries.
    """
    arguments = ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    # The harness is process 1, so no process in the sandbox can kill, stop or outlive it.
    arguments += ["--as-pid-1"]
    arguments += ["--uid", "1000", "--gid", "1000", "--hostname", "sandbox", "--clearenv"]
    arguments += ["--setenv", "PYTHONHASHSEED", "0"]  # the same program gives the same output
    for path in map(Path, ("/usr/lib", "/usr/lib64", "/lib", "/lib64")):
        if path.is_symlink():
            arguments += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            arguments += ["--ro-bind", str(path), str(path)]
    arguments += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    # A distribution's Python has its standard library in /usr/lib, which is bound above; others have their own prefix.
    arguments += ["--ro-bind", str(source / "bin" / Path(PYTHON).name), PYTHON]
    if not prefix.joinpath("lib").samefile("/usr/lib"):
        arguments += ["--ro-bind", str(source / "lib"), str(prefix / "lib")]
    for device in ("/dev/null", "/dev/zero", "/dev/urandom"):
        arguments += ["--dev-bind", device, device]
    arguments += ["--size", str(disk_bytes), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    return arguments


def memory_file(data: bytes, files: contextlib.ExitStack) -> int:
    file = files.enter_context(os.fdopen(os.memfd_create("sandbox"), "r+b"))
    file.write(data)
    file.seek(0)
    return file.fileno()


async def _wait_until_ready(process: Process) -> None:
    assert process.stdout and process.stderr, "they are pipes"
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            if await process.stdout.readline():
                return
            error = (await process.stderr.read()).decode(errors="replace").strip()[-500:]
    except TimeoutError:
        error = f"not ready within {START_TIMEOUT_S:g} s"
    hint = "bubblewrap 0.7 or newer must be allowed to make user, mount, process and network namespaces"
    raise ScoringError(FailureReason.ERROR, f"no sandbox: {error}; {hint}")


async def _outputs(process: Process, count: int, timeout_s: float) -> AsyncGenerator[str | None, None]:
    """Yields an output per test; None if it is missing or invalid, which after the start is the program's fault."""
    assert process.stdout, "it is a pipe"
    for _ in range(count):
        try:
            async with asyncio.timeout(timeout_s):
                output = json.loads(await process.stdout.readline())["output"]
        except (TimeoutError, ValueError, KeyError, TypeError, RecursionError):
            output, timeout_s = None, 0
        yield output if isinstance(output, str) else None


def _first_process(info: int) -> int | None:
    """Returns a pidfd of the namespace's first process, None if that has ended. Waits until bwrap has started it."""
    with os.fdopen(info, "rb", closefd=False) as pipe:  # to its end: bwrap dies if its report is cut off
        if (child := _CHILD.search(pipe.read())) is None:  # bwrap has ended
            return None
    try:
        return os.pidfd_open(int(child[1]))
    except ProcessLookupError:
        return None
    except OSError:  # no descriptor is left, without which nothing could end it later
        os.kill(int(child[1]), signal.SIGKILL)
        raise


async def _end(starting: asyncio.Task[Started]) -> None:
    """Kills the first process of a namespace, so that the kernel kills all others; waits until they are gone.

    bwrap itself is not killed: while it starts, its child would wait forever then, and keep pipes open that are read.
    """
    await asyncio.wait({starting})
    if starting.exception():
        return
    process, pidfd = starting.result()
    with contextlib.suppress(ProcessLookupError):
        if pidfd is None:
            process.kill()  # --die-with-parent kills the others
        else:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)  # bwrap itself stays alive to reap it
    if pidfd is not None:
        os.close(pidfd)
    await process.communicate()
