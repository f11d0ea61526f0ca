"""Makes tasks of reasoning-gym, and stores them in dataset rows, from which the environment scores them."""

import functools
import json
from collections.abc import Mapping
from typing import Any

from services.common.errors import InvalidInput

COLUMN = "reasoning_gym"
"""Column of a dataset row with a task: a JSON object with task, settings, and the entry that reasoning_gym made."""
TAG = "answer"
INSTRUCTION = f"Give the final answer between <{TAG}> and </{TAG}>."


def make_tasks(task: str, *, seed: int, size: int, settings: Mapping[str, object]) -> Any:
    """Returns the dataset of reasoning_gym: `size` entries by index, each with question, answer and metadata."""
    return _make(task, seed, size, json.dumps(settings, sort_keys=True))


@functools.lru_cache(maxsize=64)
def _make(task: str, seed: int, size: int, settings_json: str) -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        message = f"reasoning-gym cannot be imported ({error}): pip install 'lockstep-rl[environments]'"
        raise InvalidInput(message, field="task") from error
    try:
        return reasoning_gym.create_dataset(task, seed=seed, size=size, **json.loads(settings_json))
    except (ValueError, TypeError, AssertionError) as error:
        raise InvalidInput(f"reasoning-gym cannot make {task}: {error}", field="task") from error
