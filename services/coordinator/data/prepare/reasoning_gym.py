"""Makes prompt files of tasks of reasoning-gym, which the environment `reasoning_gym` scores."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from services.common.errors import InvalidInput
from services.common.reasoning_tasks import COLUMN, INSTRUCTION, make_tasks
from services.coordinator.data.prepare.convert import ConversionReport, write_splits
from services.coordinator.data.prepare.formats import Split

_SCHEMA = pa.schema([(name, pa.string()) for name in ("prompt", "answer", "source", COLUMN)])


def make_files(
    task: str, settings: Mapping[str, Any], *, num_rows: Mapping[Split, int], seed: int, out: Path
) -> ConversionReport:
    """Writes the splits to `out`: one sequence of tasks, those of train first.

    Raises:
        InvalidInput: reasoning-gym is not installed, cannot make the task, or makes one that JSON cannot hold.
    """
    tables: dict[Split, pa.Table] = {}
    first, tasks = 0, make_tasks(task, seed=seed, size=sum(num_rows.values()), settings=settings)
    for split, num in num_rows.items():
        rows = [_row(task, settings, tasks, index) for index in range(first, first + num)]
        tables[split], first = pa.Table.from_pylist(rows, _SCHEMA), first + num
    files = write_splits(tables, out)
    return ConversionReport(f"reasoning-gym {task}", f"seed {seed}", files, num_rows, dropped=(), num_held_out=0)


def parse_settings(text: str) -> dict[str, Any]:
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


def _row(task: str, settings: Mapping[str, Any], tasks: Any, index: int) -> dict[str, str]:
    entry = tasks[index]
    answer, stored = str(entry["answer"]), json.dumps({"task": task, "settings": settings, "entry": entry})
    # JSON has no tuples, and two tasks (arc_agi and rearc in 0.1.25) score an answer to a list as wrong.
    if tasks.score_answer(answer, json.loads(stored)["entry"]) != tasks.score_answer(answer, entry):
        message = f"{task}: its tasks are scored differently when stored; let the environment make them from the seed"
        raise InvalidInput(message, field="task")
    prompt = f"{entry['question']}\n\n{INSTRUCTION}"
    return {"prompt": prompt, "answer": answer, "source": task, COLUMN: stored}
