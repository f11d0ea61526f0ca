"""An environment of several turns for the quickstart's model: sums of which each begins with the last one's result."""

import random
import re
from collections.abc import Mapping

_MESSAGE = {"role": "", "content": ""}  # without a role: raw text, because the model has no chat template


class Sums:
    """Asks `num_turns` sums, the first of which is the row's prompt. A right answer is worth 1 / num_turns.

    The next sum begins with the last two digits of the right answer, whatever the policy answered.
    """

    def __init__(self, num_turns: int = 4):
        self._num_turns, self._num_left = num_turns, num_turns

    def reset(self, seed: int, row: Mapping[str, str]) -> None:
        """Takes the row's prompt, such as `47+85=`, as the first sum."""
        self._random, self._result = random.Random(seed), _result(row["prompt"])

    def step(self, text: str) -> tuple[list[dict[str, str]], float, bool]:
        """Compares the answer, and asks the next sum."""
        reward = (text == str(self._result)) / self._num_turns
        self._num_left -= 1
        first = self._result % 100
        operator = self._random.choice("+-")
        second = self._random.randint(0, 99 if operator == "+" else first)
        sum_text = f"{first}{operator}{second}="
        self._result = _result(sum_text)
        return [_MESSAGE | {"content": sum_text}], reward, self._num_left == 0


def _result(text: str) -> int:
    first, operator, second = re.fullmatch(r"(\d+)([+-])(\d+)=", text).groups()
    return int(first) + int(second) if operator == "+" else int(first) - int(second)
