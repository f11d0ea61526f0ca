"""Implements an environment of several turns for the quickstart's model: a wrong answer may be corrected."""

from collections.abc import Mapping


class Tries:
    """Asks for the row's sum again after a wrong answer. A right answer in turn k, from 0, gets 1 / 2^k and ends it."""

    def reset(self, seed: int, row: Mapping[str, str]) -> None:
        """Remembers the row's sum, such as `47+85=`, which is the first prompt."""
        self._prompt, self._answer, self._reward = row["prompt"], row["answer"], 1.0

    def step(self, text: str) -> tuple[list[dict[str, str]], float, bool]:
        """Compares the answer. Any other text than the right number is a wrong answer."""
        if text == self._answer:
            return [], self._reward, True
        self._reward /= 2
        # Raw text has no role. The model has no chat template.
        return [{"role": "", "content": self._prompt}], 0.0, False
