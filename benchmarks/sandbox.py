"""Measures the cost of the sandbox, from the call until the last process is gone, relative to a bare interpreter.

Both run an empty program within the same minute. `overhead` is their difference, sample by sample. `CPU` is the CPU
time of all processes, which other work on the machine affects less than the wall-clock time.
"""

import asyncio
import os
import resource
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

from benchmarks.report import keep
from services.common.config.reward import CodeConfig, RewardConfig
from services.reward.sandbox import PYTHON, Sandbox
from services.reward.scorers.base import Item
from services.reward.scorers.code import CodeScorer
from services.reward.scoring import ScoringRun

_REPEATS, _MANY_TESTS, _BATCH = 40, 11, 16


async def _bare() -> None:
    """Runs an interpreter with the sandbox's flags, but without the sandbox."""
    command = [PYTHON, "-S", "-s", "-P", "-B", "-X", "utf8", "-c", "pass"]
    await (await asyncio.create_subprocess_exec(*command, env={})).wait()


async def _sandboxed(sandbox: Sandbox, num_tests: int) -> None:
    async with sandbox.run("", [{"kind": "stdin", "input": ""}] * num_tests) as outputs:
        assert [output async for output in outputs] == [""] * num_tests


async def _measure(what: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """Returns wall-clock time, and CPU time of the processes that the call starts, in ms."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    await what()
    wall_ms, after = 1000 * (time.perf_counter() - start), resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_ms, 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


async def _batch(run: ScoringRun) -> float:
    tests = {"inputs": ["2 3\n", "4 5\n", "-1 1\n"], "outputs": ["5", "9", "0"]}
    program = "a, b = map(int, input().split())\nprint(a + b)"
    item = Item("", "", {"tests": tests}, program, num_tokens=1, finish_reason="stop")
    start = time.perf_counter()
    outcomes = await run.score([item] * _BATCH)
    assert [outcome.reward for outcome in outcomes] == [1.0] * _BATCH
    return _BATCH / (time.perf_counter() - start)


def _named(bare: Sequence[float], one: Sequence[float], many: Sequence[float]) -> Iterator[tuple[str, float]]:
    """Yields the numbers of one round with their names; each argument is (wall, CPU) in ms."""
    for at, kind in enumerate(("wall", "CPU")):
        yield f"bare python, {kind} [ms]", bare[at]
        yield f"sandbox, {kind} [ms]", one[at]
        yield f"overhead, {kind} [ms]", one[at] - bare[at]
        yield f"each further test, {kind} [ms]", (many[at] - one[at]) / (_MANY_TESTS - 1)


async def _samples() -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {}
    run = ScoringRun(RewardConfig(scorers=(CodeConfig(max_concurrent=len(os.sched_getaffinity(0))),)))
    try:
        await run.open()
        scorer = run._scorers[0]
        assert isinstance(scorer, CodeScorer)
        sandbox = scorer._sandbox
        for _ in range(_REPEATS):
            bare = await _measure(_bare)
            one = await _measure(lambda: _sandboxed(sandbox, 1))
            many = await _measure(lambda: _sandboxed(sandbox, _MANY_TESTS))
            for name, value in _named(bare, one, many):
                samples.setdefault(name, []).append(value)
        samples["programs of 3 tests [1/s]"] = [await _batch(run) for _ in range(3)]
    finally:
        await run.close()
    return samples


def main() -> None:
    """Measures and saves the result."""
    load, samples = os.getloadavg(), asyncio.run(_samples())
    bwrap = subprocess.run(["bwrap", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    keep("sandbox", samples, libraries=("pydantic",), bwrap=bwrap, load_average=[load, os.getloadavg()])


if __name__ == "__main__":
    main()
