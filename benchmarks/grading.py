"""Measures how many samples per second the math scorer grades through its worker pool, with typical answers.

`python -m benchmarks.grading [NAME] [NUM_WORKERS]` saves the result as NAME. The mix is that of a mathematics dataset
(most answers are integers), half of the samples are right, prompt groups have 8 samples, and many groups are in flight.
"""

import asyncio
import os
import random
import sys
import time
from pathlib import Path

from benchmarks.report import keep
from services.common.config.reward import RewardConfig
from services.reward.scorers.base import Item
from services.reward.scoring import ScoringRun

_GROUPS, _GROUP_SIZE, _IN_FLIGHT, _REPEATS = 200, 8, 32, 7
_PROSE = "We let $x = {n}$ and use that $a^2 + b^2 = c^2$, so the first term is ${n}$. Hence it follows that "
# Share of the groups, reference answer, a right answer as a policy would write it, a wrong one. {n} is a number.
_MIX = [
    (60, "{n}", r"\boxed{{{n}}}", r"\boxed{{{m}}}"),
    (12, r"\frac{{{n}}}{{997}}", r"\boxed{{\dfrac{{{n}}}{{997}}}}", r"\boxed{{\frac{{{m}}}{{997}}}}"),
    (8, "{n}.5", r"\boxed{{\frac{{{twice}}}{{2}}}}", r"\boxed{{{m}.5}}"),
    (8, "{n}", "the answer is {n}.", "the answer is {m}."),
    (4, r"{n}\sqrt{{3}}", r"\boxed{{{n}\sqrt{{3}}}}", r"\boxed{{{m}\sqrt{{3}}}}"),
    (3, r"\text{{point {n}}}", r"\boxed{{\text{{point {n}}}}}", r"\boxed{{\text{{point {m}}}}}"),
    (2, r"{n}\%", r"\boxed{{{n}\%}}", r"\boxed{{{m}\%}}"),
    (2, "x^2+{n}x", r"\boxed{{x^2 + {n} x}}", r"\boxed{{x(x+{m})}}"),
    (1, r"({n},{next})", r"\boxed{{({n}, {next})}}", r"\boxed{{({next}, {n})}}"),
]


def make_groups(seed: int) -> list[list[Item]]:
    """Returns prompt groups whose answers repeat only within a group."""
    source = random.Random(seed)
    shares = [share for share, *_ in _MIX]
    return [_make_group(source, *source.choices(_MIX, shares)[0][1:]) for _ in range(_GROUPS)]


def _make_group(source: random.Random, answer: str, right: str, wrong: str) -> list[Item]:
    n = source.randrange(1000, 100_000)
    items = []
    for index in range(_GROUP_SIZE):
        numbers = {"n": n, "m": n + 1 + index, "next": n + 1, "twice": 2 * n + 1}
        text = _PROSE.format(n=n) * 12 + (right if index % 2 else wrong).format(**numbers)
        items.append(Item("?", answer.format(**numbers), {}, text, len(text) // 4, "stop"))
    return items


async def _measure(run: ScoringRun, seed: int) -> float:
    """Returns samples graded per second; checks that all grades are right."""
    groups, slots = make_groups(seed), asyncio.Semaphore(_IN_FLIGHT)

    async def score(group: list[Item]) -> None:
        async with slots:
            rewards = [outcome.reward for outcome in await run.score(group)]
        assert rewards == [float(index % 2) for index in range(_GROUP_SIZE)], (group[0].answer, rewards)

    begin = time.perf_counter()
    await asyncio.gather(*map(score, groups))
    return _GROUPS * _GROUP_SIZE / (time.perf_counter() - begin)


async def _run(num_workers: int) -> tuple[list[float], list[float]]:
    config = {"scorers": [{"kind": "math"}], "num_workers": num_workers, "timeout_s": 60}
    run, per_s, cpu_ms = ScoringRun(RewardConfig.model_validate(config)), [], []
    try:
        await run.open()
        await _measure(run, seed=-1)  # warms up: the first parses build tables
        for seed in range(_REPEATS):
            begin_s = _cpu_s()
            per_s.append(await _measure(run, seed))
            cpu_ms.append((_cpu_s() - begin_s) / (_GROUPS * _GROUP_SIZE) * 1e3)
    finally:
        await run.close()
    return per_s, cpu_ms


def _cpu_s() -> float:
    """Returns the CPU time in seconds that this process and its workers have used."""
    children = [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
    ticks = 0
    for pid in ["self", *children]:
        ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measures and saves the result."""
    name, num_workers = (sys.argv[1:] + ["grading", "2"][len(sys.argv) - 1 :])[:2]
    load = os.getloadavg()[0]
    per_s, cpu_ms = asyncio.run(_run(int(num_workers)))
    keep(
        name,
        {"gradings [1/s]": per_s, "CPU time for one grading, service and workers [ms]": cpu_ms},
        libraries=("math-verify", "sympy", "latex2sympy2_extended"),
        num_workers=int(num_workers),
        num_gradings=_REPEATS * _GROUPS * _GROUP_SIZE,
        load_average_before=load,
    )


if __name__ == "__main__":
    main()
