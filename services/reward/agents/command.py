"""Runs agents that are programs, each in a sandbox of its own that reaches nothing but the model."""

import asyncio
import base64
import contextlib
import hashlib
import json
import logging
import os
import re
import socket
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from services.common.config.agent_rules import prompt_text
from services.common.config.environment import AgentEnvironmentConfig
from services.reward.agents.dialect import MODEL
from services.reward.agents.runners import Part, Played, Runner
from services.reward.errors import EnvironmentFailure, EpisodeError, FailureReason, ScoringError
from services.reward.sandbox import START_TIMEOUT_S, Limits, Sandbox, memory_file
from services.reward.sandboxed.agent import HOME, MAX_TEXT_BYTES, PORT, WORKSPACE

log = logging.getLogger(__name__)

_URL = f"http://127.0.0.1:{PORT}"
_SYSTEM = ("/usr", "/bin", "/sbin", "/etc/alternatives", "/etc/ssl", "/etc/ca-certificates", "/etc/localtime")
_SHARED_MEMORY_BYTES = 16 << 20
_DEV = ("--dev", "/dev", "--remount-ro", "/dev")
# The same without terminals, for which bwrap makes one more user namespace: deploy/seccomp.json refuses that.
_DEV_WITHOUT_TERMINALS = (
    *("--dev-bind", "/dev/full", "/dev/full", "--dev-bind", "/dev/random", "/dev/random"),
    *("--symlink", "/proc/self/fd", "/dev/fd", "--symlink", "/proc/self/fd/0", "/dev/stdin"),
    *("--symlink", "/proc/self/fd/1", "/dev/stdout", "--symlink", "/proc/self/fd/2", "/dev/stderr"),
)
_MAX_SHOWN = 1000  # characters of standard error
_TRIAL = {"command": ["/bin/true"], "setup": [], "env": {}, "files": {}, "collect": [], "max_files_bytes": 0}


class CommandRunner(Runner):
    """Runs `environment.command`."""

    def __init__(self, config: AgentEnvironmentConfig):
        self._config = config
        self._sandbox = AgentSandbox(config)
        self._files: dict[str, str] = {}
        self._inputs: dict[str, asyncio.StreamWriter] = {}

    async def open(self) -> None:
        config = self._config
        try:
            contents = {name: Path(path).expanduser().read_bytes() for name, path in config.files.items()}
            await self._sandbox.open()
        except (OSError, ScoringError, EpisodeError) as error:
            raise EpisodeError(EnvironmentFailure.REFUSED, getattr(error, "detail", str(error))) from error
        self._files = {name: base64.b64encode(content).decode() for name, content in contents.items()}
        parts = [config.command, config.setup, config.env, self._files, config.mounts]
        self.version = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]

    async def run(self, part: Part) -> Played:
        config, values = self._config, {"url": _URL, "key": part.key, "seed": str(part.seed)}
        row = {**values, "prompt": _prompt_text(config.command, part.row)}
        env = {**_base_env(values), **{name: _substitute(value, values) for name, value in config.env.items()}}
        job = {
            "command": [_substitute(word, row) for word in config.command],
            "setup": config.setup,
            "env": env,
            "files": {**self._files, "~/row.json": base64.b64encode(json.dumps(part.row).encode()).decode()},
            "collect": config.collect,
            "max_files_bytes": int(config.max_files_mib * 2**20),
        }
        async with self._sandbox.start(job) as (stdin, result, listening):
            await part.serve(listening)
            self._inputs[part.episode_id] = stdin
            try:
                said = json.loads(await result)
            except ValueError as error:
                detail = "the sandbox was ended from outside, or ran out of memory"
                raise EpisodeError(EnvironmentFailure.CRASHED, detail) from error
            finally:
                del self._inputs[part.episode_id]
        if "error" in said:
            raise EpisodeError(EnvironmentFailure.CRASHED, said["error"])
        files = {name: base64.b64decode(content) for name, content in said["files"].items()}
        return Played(said["exit_code"], said["text"], files, said["errors"][-_MAX_SHOWN:])

    def end(self, episode_id: str) -> None:
        if stdin := self._inputs.get(episode_id):
            stdin.close()

    async def close(self) -> None:
        self._sandbox.close()


class AgentSandbox(Sandbox):
    """Starts programs in sandboxes that have their own loopback. A socket that listens there is handed to the host."""

    _has_loopback = True

    def __init__(self, config: AgentEnvironmentConfig):
        limits = Limits(
            timeout_s=config.episode_s,
            memory_bytes=int(config.max_memory_gib * 2**30),
            disk_bytes=config.max_disk_mib * 2**20,
            max_processes=config.max_processes,
            max_output_bytes=MAX_TEXT_BYTES,
        )
        super().__init__(limits)
        self._mounts = config.mounts
        files = int(config.max_files_mib * 2**20)
        self._result_bytes = 2 * files + 8 * MAX_TEXT_BYTES  # base64, and JSON of control characters

    async def open(self) -> None:
        """Makes what all sandboxes need, and starts one. Raises ScoringError or EpisodeError if this host cannot."""
        passwd, group = (self._files.enter_context(_named_file(f"agent:x:1000:1000{end}")) for end in _ACCOUNT)
        more = ["--proc", "/proc", *_DEV, "--size", str(_SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm"]
        more += ["--ro-bind", passwd, "/etc/passwd", "--ro-bind", group, "/etc/group"]
        for path in _SYSTEM:
            link = Path(path)
            more += ["--symlink", os.readlink(path), path] if link.is_symlink() else ["--ro-bind-try", path, path]
        readable = [*self._mounts, *([sys.prefix] if sys.prefix != sys.base_prefix else [])]
        for path in readable:
            self.check_reachable(Path(path), "move it to a directory that everybody can enter")
        more += [word for path in readable for word in ("--ro-bind", path, path)]
        for place in (WORKSPACE, HOME):
            more += ["--size", str(self._limits.disk_bytes), "--tmpfs", place]
        await self._prepare(*more)
        try:
            await self._try_sandbox()
        except EpisodeError:
            place = self._arguments.index(_DEV[0])
            self._arguments[place : place + len(_DEV)] = _DEV_WITHOUT_TERMINALS
            await self._try_sandbox()
            log.warning("this host refuses sandboxes with terminals: programs of agents have no pseudo-terminals")

    async def _try_sandbox(self) -> None:
        async with self.start(_TRIAL) as (_, result, listening):
            listening.close()
            done, _ = await asyncio.wait({result}, timeout=START_TIMEOUT_S)
        if not done:
            raise EpisodeError(EnvironmentFailure.CRASHED, f"no sandbox: not ready within {START_TIMEOUT_S:g} s")

    @contextlib.asynccontextmanager
    async def start(
        self, job: Mapping[str, object]
    ) -> AsyncIterator[tuple[asyncio.StreamWriter, asyncio.Task[bytes], socket.socket]]:
        """Yields the program's input, whose end ends it, its result to come, which is JSON text, and a socket that
        listens at PORT of the sandbox.

        All of its processes have ended when the context exits. Raises EpisodeError if it cannot start.
        """
        rlimits = {**self._limits.rlimits, "RLIMIT_NOFILE": 1024}
        del rlimits["RLIMIT_CPU"]
        try:
            async with (
                _opened({**job, "rlimits": rlimits}) as (result, line, passed, files),
                self._started("agent", passed, files, stdin=PIPE, stdout=DEVNULL) as process,
            ):
                assert process.stdin and process.stderr, "they are pipes"
                listening = await asyncio.to_thread(_receive_socket, line)
                if listening is None:
                    error = (await process.stderr.read()).decode(errors="replace").strip()[-500:]
                    detail = f"no sandbox: {error}; see docs/deployment.md for containers"
                    raise ScoringError(FailureReason.ERROR, detail)
                reading = asyncio.create_task(_read(result, self._result_bytes))
                try:
                    yield process.stdin, reading, listening
                finally:
                    reading.cancel()
                    await asyncio.gather(reading, return_exceptions=True)
        except ScoringError as error:
            raise EpisodeError(EnvironmentFailure.CRASHED, error.detail) from error


@contextlib.asynccontextmanager
async def _opened(
    job: Mapping[str, object],
) -> AsyncIterator[tuple[BinaryIO, socket.socket, Sequence[int], contextlib.ExitStack]]:
    """Yields this process's ends of a pipe and a line to a sandbox, its descriptors, and what closes these here.

    If there are too few descriptors, none stays open.
    """
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as files:
        result_end, result_write = os.pipe()
        result = ours.enter_context(os.fdopen(result_end, "rb"))
        files.callback(os.close, result_write)
        line, line_inside = socket.socketpair()
        ours.enter_context(line)
        files.enter_context(line_inside)
        job_file = memory_file(json.dumps(job).encode(), files)
        yield result, line, (job_file, result_write, line_inside.fileno()), files.pop_all()


def _receive_socket(line: socket.socket) -> socket.socket | None:
    """Returns the socket that the sandbox sends; None if it has ended instead."""
    with line:
        line.settimeout(START_TIMEOUT_S)
        with contextlib.suppress(OSError):
            _, found, _, _ = socket.recv_fds(line, 1, 1)
            return socket.socket(fileno=found[0]) if found else None
    return None


_ACCOUNT = (f"::{HOME}:/bin/sh\n", ":\n")


@contextlib.contextmanager
def _named_file(text: str) -> Iterator[str]:
    """Yields the path of a file that everyone can read."""
    with tempfile.NamedTemporaryFile("w", prefix="lockstep-account-") as file:
        file.write(text)
        file.flush()
        os.chmod(file.name, 0o644)
        yield file.name


async def _read(pipe: BinaryIO, most: int) -> bytes:
    """Returns what is written to a pipe until its end; less, if there are more than `most` bytes."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    data = bytearray()
    try:
        while (part := await reader.read(1 << 16)) and len(data) < most:
            data += part
        return bytes(data)
    finally:
        transport.close()


def _base_env(values: Mapping[str, str]) -> dict[str, str]:
    url, key = f"{values['url']}/v1", values["key"]
    python = [str(Path(sys.prefix) / "bin")]
    return {
        "HOME": HOME,
        "USER": "agent",
        "LANG": "C.UTF-8",
        "PATH": ":".join([*python, "/usr/local/bin", "/usr/bin", "/bin"]),
        "TMPDIR": "/tmp",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OPENAI_BASE_URL": url,
        "OPENAI_API_BASE": url,
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": values["url"],
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_MODEL": MODEL,
        "LOCKSTEP_ROW": f"{HOME}/row.json",
        "LOCKSTEP_SEED": values["seed"],
    }


def _prompt_text(command: Sequence[str], row: Mapping[str, Any]) -> str:
    """Returns the row's prompt as {prompt} of a command. Raises EpisodeError if it is other than a user's message."""
    prompt = row.get("prompt", "")
    if not any("{prompt}" in word for word in command):
        return str(prompt)
    text = prompt_text(prompt)
    if text is None:
        roles = [message["role"] for message in prompt]
        detail = (
            f"environment.command has {{prompt}}, and the row's prompt is messages of {', '.join(roles)}, not text or "
            "one message of a user: leave {prompt} out, and let the program read the file that LOCKSTEP_ROW names"
        )
        raise EpisodeError(EnvironmentFailure.REFUSED, detail)
    return text


def _substitute(text: str, values: Mapping[str, str]) -> str:
    """Returns the text with {name} replaced by each value. Other braces stay, as JSON may have them."""
    return re.sub("|".join(rf"\{{{name}\}}" for name in values), lambda match: values[match[0][1:-1]], text)
