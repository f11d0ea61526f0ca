"""Gives tasks of reasoning-gym and scores the answers, in a worker process."""

import json
from collections.abc import Mapping
from importlib.metadata import version as version_of
from typing import Any

from services.common.reasoning_tasks import COLUMN, INSTRUCTION, TAG, make_tasks
from services.reward.errors import EnvironmentFailure, EpisodeError


class Task:
    """Scores one answer: the text after the last <answer>, up to </answer>, or all of it if there is none."""

    version = f"reasoning-gym-{version_of('reasoning-gym')}"
    roles = ("user",)

    @classmethod
    def prepare(cls, task: str, kwargs: Mapping[str, Any]) -> None:
        """Checks that the task can be made.

        Raises:
            InvalidInput: It cannot.
        """
        make_tasks(task, seed=0, size=1, settings=kwargs)

    def __init__(self, task: str, kwargs: Mapping[str, Any]):
        self._task, self._kwargs = task, kwargs

    def reset(self, seed: int, row: Mapping[str, Any]) -> str | None:
        """Takes the row's task. Without one, the seed makes a task, whose question is returned.

        Raises:
            EpisodeError: REFUSED if the row has another task.
        """
        if COLUMN not in row:
            self._tasks = make_tasks(self._task, seed=seed % 2**31, size=1, settings=self._kwargs)
            self._entry = self._tasks[0]
            return f"{self._entry['question']}\n\n{INSTRUCTION}"
        made = json.loads(row[COLUMN])
        if made["task"] != self._task:
            raise EpisodeError(EnvironmentFailure.REFUSED, f"the row is of task {made['task']}, not {self._task}")
        self._tasks = make_tasks(self._task, seed=0, size=1, settings=made["settings"])
        self._entry = made["entry"]
        return None

    def step(self, text: str) -> tuple[None, float, bool]:
        """Scores the answer, which ends the episode."""
        return None, float(self._tasks.score_answer(_answer(text), self._entry)), True


def _answer(text: str) -> str:
    return text.rpartition(f"<{TAG}>")[2].partition(f"</{TAG}>")[0].strip()
