"""Runs programs in the sandbox."""

import asyncio
import json
import platform
from collections.abc import Mapping
from pathlib import Path

from services.common.config.environment import PythonToolConfig
from services.reward.environments.clock import off_the_clock
from services.reward.environments.tool_calls.schema import text_tool_schema
from services.reward.environments.toolbox.base import Tool
from services.reward.errors import EnvironmentFailure, EpisodeError, ScoringError
from services.reward.sandbox import Limits, Sandbox

_SUPERVISOR = Path(__file__).with_name("supervise.py").read_text()
_START_S = 5.0
"""Extra time for the start of two interpreters."""
_MARK_CHARS = 200
"""Number of characters that is more than supervise.py adds to the output."""
_MEMORY_BYTES, _DISK_BYTES, _MAX_PROCESSES = 1 << 30, 64 << 20, 16


class Python(Tool):
    """Returns a program's output, including errors. Each program has a sandbox of its own."""

    version = f"python-2-{platform.python_version()}"
    schema = text_tool_schema("python", "Runs a Python program and returns what it prints.", "code", "The program.")

    def __init__(self, config: PythonToolConfig):
        self._config = config
        self._slots = asyncio.Semaphore(config.max_concurrent)
        self._sandbox = Sandbox(
            Limits(
                timeout_s=config.timeout_s + _START_S,
                memory_bytes=_MEMORY_BYTES,
                disk_bytes=_DISK_BYTES,
                max_processes=_MAX_PROCESSES,
                max_output_bytes=4 * (config.max_output_chars + _MARK_CHARS),
            )
        )

    async def open(self) -> None:
        """Creates one sandbox, to check that this host can."""
        try:
            await self._sandbox.open()
        except ScoringError as error:
            raise EpisodeError(EnvironmentFailure.CRASHED, error.detail) from error

    async def call(self, arguments: Mapping[str, str], limit_s: float) -> str:
        """Runs the program within both time limits; the policy is told if it takes longer.

        Nothing of this counts toward `turn_s`: waiting is not the program's fault, and the program has its own limit.
        """
        job = {"program": arguments["code"], "timeout_s": min(self._config.timeout_s, limit_s)}
        test = {"kind": "stdin", "input": json.dumps({**job, "max_chars": self._config.max_output_chars})}
        try:
            with off_the_clock():
                return await self._run(test)
        except ScoringError as error:
            raise EpisodeError(EnvironmentFailure.CRASHED, error.detail) from error

    async def close(self) -> None:
        """Removes the sandbox's files."""
        self._sandbox.close()

    async def _run(self, test: Mapping[str, object]) -> str:
        async with self._slots, self._sandbox.run(_SUPERVISOR, [test]) as outputs:
            (output,) = [output async for output in outputs]
        return "error: the program was stopped: it exceeded a limit" if output is None else output
