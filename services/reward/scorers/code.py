"""Scores programs by running tests in a sandbox."""

import asyncio
import contextlib
import platform
from collections.abc import AsyncIterator, Sequence

from services.common.config.reward import CodeConfig, RewardConfig
from services.reward.errors import FailureReason, ScoringError
from services.reward.graders.code import Tests, find_program, read_tests
from services.reward.graders.texts import unindent
from services.reward.sandbox import Limits, Sandbox
from services.reward.scorers.base import Item, Scorer, gather_scores, share_s


class CodeScorer(Scorer):
    """Scores 1 if the program passes all tests, or the fraction it passes; see services/reward/graders/code.py.

    Every fault of the program counts as a failed test: no program, an exception, a timeout, or an exceeded limit.
    """

    version = f"7/python-{platform.python_version()}"

    def __init__(self, config: CodeConfig, reward: RewardConfig):
        self._config, self._group_timeout_s = config, reward.group_timeout_s
        self._slots = asyncio.Semaphore(config.max_concurrent)
        self._limits = Limits(
            timeout_s=config.timeout_s,
            memory_bytes=int(config.max_memory_gib * 2**30),
            disk_bytes=config.max_disk_mib * 2**20,
            max_processes=config.max_processes,
            max_output_bytes=int(config.max_output_mib * 2**20),
        )
        self._sandbox = Sandbox(self._limits)

    async def open(self) -> None:
        await self._sandbox.open()

    async def score_group(self, items: Sequence[Item]) -> list[float | ScoringError]:
        """Scores each item. Time that an item waits for others does not count against its limit."""
        slots = self._config.max_concurrent
        limit_s = share_s(self._group_timeout_s, num_samples=len(items), num_slots=slots)
        limit_s = min(limit_s, self._config.program_timeout_s)
        return await gather_scores(self._score(item, limit_s) for item in items)

    async def _score(self, item: Item, limit_s: float) -> float:
        """Returns a score from 0.0 to 1.0. Tests that have not ended `limit_s` after the start have failed."""
        column = item.column(self._config.tests_key, "tests_key")
        tests = read_tests(column, float_tolerance=self._config.float_tolerance)
        self._check_sizes(tests)
        program = self._program(item)
        if program is None:
            return 0.0
        async with self._slots:
            return await self._fraction_passed(unindent(program), tests, limit_s)

    def _program(self, item: Item) -> str | None:
        if not self._config.file:
            return find_program(item.completion, require_fence=self._config.require_fence)
        left = item.extra.get("agent")
        return left["files"].get(self._config.file) if isinstance(left, dict) else None

    async def close(self) -> None:
        self._sandbox.close()

    def _check_sizes(self, tests: Tests) -> None:
        for size, limit, name in (
            (max(test.input_bytes for test in tests.tests), self._limits.disk_bytes, "max_disk_mib"),
            (max(test.output_bytes for test in tests.tests), self._limits.max_output_bytes, "max_output_mib"),
        ):
            if size > limit:
                detail = f"a test of {size} bytes is above the scorer's {name}, so no program could pass it"
                raise ScoringError(FailureReason.INVALID_ANSWER, detail)

    async def _fraction_passed(self, program: str, tests: Tests, limit_s: float) -> float:
        passed: list[bool] = []
        async with self._sandbox.run(program, [test.request for test in tests.tests], tests.setup) as outputs:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._judge(outputs, tests, passed)
        fraction = sum(passed) / len(tests.tests)
        return fraction if self._config.partial else float(fraction == 1.0)

    async def _judge(self, outputs: AsyncIterator[str | None], tests: Tests, passed: list[bool]) -> None:
        """Adds to `passed` whether each test accepts its output. Ends early once the reward is known to be 0."""
        for test in tests.tests:
            output = await anext(outputs)
            passed.append(output is not None and test.accepts(output))
            if not passed[-1] and not self._config.partial:
                return
