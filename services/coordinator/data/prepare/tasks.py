"""Makes prompt files of tasks that are generated: the quickstart's arithmetic, and those of reasoning-gym.

Arithmetic is additions and subtractions of whole numbers up to 99, written as `47+85=`. Answers are never negative and
have no leading zeros. A checksum of its operands, independent of the seed and of their order, assigns each problem to
the train or the test split, so no train set has a problem of any test set. The environment `reasoning_gym` scores the
others.
"""

import json
import random
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from services.common.errors import InvalidInput
from services.common.json_values import JsonObject
from services.common.reasoning_tasks import COLUMN, INSTRUCTION, make_tasks
from services.coordinator.data.prepare.convert import ConversionReport, write_rows
from services.coordinator.data.prepare.formats import Split

MAX_OPERAND = 99
_TEST_ONE_IN = 10


def problems(split: Split, num: int, seed: int) -> list[JsonObject]:
    """Returns `num` distinct problems of `split` in random order; the same arguments give the same rows everywhere.

    The train split has 13,548 problems and the test split 1,502; two thirds are additions. `level` is the number of
    carries, or of borrows for a subtraction: 0 to 2.

    Raises:
        InvalidInput: `split` has fewer than `num` problems, or `num` is below one.
    """
    pool = _pool(split)
    if not 1 <= num <= len(pool):
        raise InvalidInput(
            f"num is {num}: it must be from 1 to {len(pool)}, the number of problems in the {split} split", field="num"
        )
    return [_problem(*key) for key in random.Random(f"{split}/{seed}").sample(pool, num)]


@cache
def _pool(split: Split) -> list[tuple[int, str, int]]:
    operands = range(MAX_OPERAND + 1)
    everything = [(a, op, b) for a in operands for op in "+-" for b in operands if op == "+" or a >= b]
    return [key for key in everything if _split_of(*key) == split]


def _split_of(a: int, op: str, b: int) -> Split:
    key = f"{min(a, b)}{op}{max(a, b)}"
    return "test" if zlib.crc32(key.encode()) % _TEST_ONE_IN == 0 else "train"


def _problem(a: int, op: str, b: int) -> JsonObject:
    answer = a + b if op == "+" else a - b
    # Every borrow of a - b is a carry of answer + b.
    level = _carries(a, b) if op == "+" else _carries(answer, b)
    return {"prompt": f"{a}{op}{b}=", "answer": str(answer), "level": level}


def _carries(a: int, b: int) -> int:
    """Counts the carries of `a + b`. Each carry reduces the digit sum by 9: ten less in one column, one more in the
    next.
    """
    return (sum(map(int, f"{a}{b}")) - sum(map(int, str(a + b)))) // 9


_ARITHMETIC = pa.schema([("prompt", pa.string()), ("answer", pa.string()), ("level", pa.int64())])
_SCHEMA = pa.schema([(name, pa.string()) for name in ("prompt", "answer", "source", COLUMN)])


def make_arithmetic(*, num_rows: Mapping[Split, int], seed: int, out: Path) -> ConversionReport:
    """Writes the splits to `out`. Raises InvalidInput as `problems` does."""
    rows: dict[Split, list[JsonObject]] = {split: problems(split, num, seed) for split, num in num_rows.items()}
    return write_rows("arithmetic", f"seed {seed}", rows, _ARITHMETIC, out)


def make_files(
    task: str, settings: Mapping[str, object], *, num_rows: Mapping[Split, int], seed: int, out: Path
) -> ConversionReport:
    """Writes the splits to `out`: one sequence of tasks, those of train first.

    Raises:
        InvalidInput: reasoning-gym is not installed, cannot make the task, or makes one that JSON cannot hold.
    """
    rows: dict[Split, list[JsonObject]] = {}
    first, tasks = 0, make_tasks(task, seed=seed, size=sum(num_rows.values()), settings=settings)
    for split, num in num_rows.items():
        rows[split] = [_row(task, settings, tasks, index) for index in range(first, first + num)]
        first += num
    return write_rows(f"reasoning-gym {task}", f"seed {seed}", rows, _SCHEMA, out)


def parse_settings(text: str) -> dict[str, object]:
    """Returns the settings of a task from JSON.

    Raises:
        InvalidInput: It is no JSON object.
    """
    try:
        settings = json.loads(text)
    except ValueError as error:
        raise InvalidInput(f"--settings is not JSON: {error}", field="settings") from error
    if not isinstance(settings, dict):
        raise InvalidInput("--settings must be a JSON object", field="settings")
    return settings


def _row(task: str, settings: Mapping[str, object], tasks: Any, index: int) -> JsonObject:
    entry = tasks[index]
    answer, stored = str(entry["answer"]), json.dumps({"task": task, "settings": settings, "entry": entry})
    # JSON has no tuples, and two tasks (arc_agi and rearc in 0.1.25) score an answer to a list as wrong.
    if tasks.score_answer(answer, json.loads(stored)["entry"]) != tasks.score_answer(answer, entry):
        message = f"{task}: its tasks are scored differently when stored; let the environment make them from the seed"
        raise InvalidInput(message, field="task")
    prompt = f"{entry['question']}\n\n{INSTRUCTION}"
    return {"prompt": prompt, "answer": answer, "source": task, COLUMN: stored}
