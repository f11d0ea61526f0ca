"""Starts and kills processes that exchange lines of JSON with this one, so that nothing is pickled."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

Reply = Mapping[str, Any]
"""A line of JSON that a child writes."""
# How long a process that has closed its pipe may take to exit, which on a busy machine is more than a moment.
_EXIT_S = 10.0


class Child:
    """Runs a module as a process, in a session of its own so that its children can be killed with it."""

    def __init__(self, module: str, max_reply_bytes: int, *, same_hashes: bool = False):
        """Prepares a process.

        Args:
            module: What it runs.
            max_reply_bytes: Maximum size of a line that it writes.
            same_hashes: Whether sets of text have the same order in every process. By default, Python makes it random.
        """
        self._module, self._max_reply_bytes = module, max_reply_bytes
        self._variables = {"PYTHONHASHSEED": "0"} if same_hashes else {}
        self._process: asyncio.subprocess.Process | None = None

    @property
    def alive(self) -> bool:
        """Returns whether the process is running."""
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        """Returns the id of the last started process; 0 if none was started."""
        return self._process.pid if self._process else 0

    async def start(self) -> None:
        """Starts the process."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self._module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=self._max_reply_bytes,
            start_new_session=True,
            env={**os.environ, **self._variables},
        )

    async def write(self, message: Mapping[str, object]) -> None:
        """Sends a line.

        Raises:
            OSError: The process is gone.
        """
        assert self._process and self._process.stdin, "start made it, with pipes"
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        await self._process.stdin.drain()

    async def read(self) -> Reply:
        """Receives a line.

        Raises:
            EOFError: The process is gone, or has closed its pipe.
            ValueError: The line has more than `max_reply_bytes` or is not JSON.
        """
        assert self._process and self._process.stdout, "start made it, with pipes"
        line = await self._process.stdout.readline()
        if not line.endswith(b"\n"):  # empty or incomplete: the process died
            raise EOFError
        return json.loads(line)

    async def kill(self) -> None:
        """Kills the process and its children, and waits until it is gone."""
        if self._process is None:
            return
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    async def exit_code(self) -> int:
        """Returns the exit code of a process that closed its pipe. Kills it if it does not exit within `_EXIT_S`."""
        assert self._process, "start made it"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_S):
                await self._process.wait()
        await self.kill()
        return await self._process.wait()
