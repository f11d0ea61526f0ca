"""Prompts of a run. The batch of a step follows from (dataset, seed, step) alone: there is no loader state to save."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from services.common.config.data import DataConfig
from services.coordinator.data.order import EpochOrder
from services.coordinator.data.rows import PromptFile, PromptRow
from services.coordinator.data.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Example: Prompt("17-9f2c41d0", "Q: 17 + 25 = ?", (48, 25, 16), "42", {"level": 1})
    """

    prompt_id: str
    """As Row.prompt_id."""
    text: str
    """What was tokenised, template included."""
    tokens: tuple[int, ...]
    answer: str
    extra: dict[str, object]
    """Further columns, JSON-able."""


class Prompts(Sequence[Prompt]):
    """Prompts in the order of their files."""

    def __init__(self, rows: Sequence[PromptRow]):
        self._rows = rows
        digest = hashlib.blake2b(digest_size=16)
        for row in rows:
            digest.update(row.number.to_bytes(8, "little") + row.content_hash)
        digest.update(np.cumsum([0, *(row.num_tokens for row in rows)], dtype="<i8").tobytes())
        for row in rows:
            digest.update(row.tokens.astype("<u4").tobytes())
        self.digest = digest.hexdigest()
        """128-bit hash, as hex, of rows, order and token ids: all that a run sees of these prompts."""

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = self._rows[index]
        return Prompt(row.prompt_id, row.pieces[0], tuple(row.tokens.tolist()), row.answer, row.extra)


class PromptDataset:
    """Training prompts, cut into the batches of the run's steps."""

    def __init__(self, prompts: Prompts, order: EpochOrder):
        self.prompts = prompts
        self._order = order

    @classmethod
    def load(cls, config: DataConfig, tokenizer: Tokenizer, *, seed: int) -> "PromptDataset":
        """Reads, checks and tokenises `config.train`; raises as RowFile.train."""
        rows, order = PromptFile.train(config, tokenizer, seed)
        return cls(Prompts(rows), order)

    @property
    def digest(self) -> str:
        """See Prompts.digest."""
        return self.prompts.digest

    def __len__(self) -> int:
        return len(self.prompts)

    def batch(self, step: int) -> list[Prompt]:
        """The `prompts_per_step` prompts of `step`, all different; to resume is to ask for the next step.

        Raises:
            ValueError: `step` is negative.
        """
        return [self.prompts[int(index)] for index in self._order.indices(step)]


def load_eval(config: DataConfig, tokenizer: Tokenizer) -> dict[str, Prompts]:
    """The held-out prompts by name, each set in the order of its file; raises as RowFile.held_out."""
    return {name: Prompts(rows) for name, rows in PromptFile.held_out(config, tokenizer).items()}
