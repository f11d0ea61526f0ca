"""Loads the prompts of a run. A step's batch depends only on (dataset, seed, step), so no loader state is saved."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from services.common.config.data import DataConfig
from services.common.errors import InvalidInput
from services.coordinator.data.order import EpochOrder
from services.coordinator.data.reading.rows import PromptFile, PromptRow, RowPrompt
from services.coordinator.text.chat_template import Message
from services.coordinator.text.tokenizer import Tokenizer

_MOST_VALUES = 50  # of data.metrics_column; each is a metric of every step, and a curve of the report


@dataclass(frozen=True, slots=True)
class Prompt:
    """Holds one prompt.

    Example: Prompt("17-9f2c41d0", "6 * 7 =", (48, 25, 16), "42", {"level": 1}, ({"role": "", "content": "6 * 7 ="},),
    row_prompt="6 * 7 =")
    """

    prompt_id: str
    """See Row.prompt_id."""
    text: str
    """The text that was tokenized, after the chat template."""
    tokens: tuple[int, ...]
    answer: str | None
    """None if the row has none, which only rows that no scorer reads may do."""
    extra: dict[str, object]
    """Further columns that the row has, as JSON values."""
    messages: tuple[Message, ...]
    """Messages that the chat template rendered as `text`, including the system prompt. Without a template, one message
    with an empty role and the whole text."""
    row_prompt: RowPrompt
    """The prompt of the row itself, before system prompt and chat template: its text, or its list of messages."""


class Prompts(Sequence[Prompt]):
    """Holds prompts in file order."""

    def __init__(self, rows: Sequence[PromptRow]):
        self._rows = rows
        digest = hashlib.blake2b(digest_size=16)
        for row in rows:
            digest.update(row.number.to_bytes(8, "little") + row.content_hash)
        digest.update(np.cumsum([0, *(row.num_tokens for row in rows)], dtype="<i8").tobytes())
        for row in rows:
            digest.update(row.tokens.astype("<u4").tobytes())
        self.digest = digest.hexdigest()
        """128-bit hex digest of everything a run sees of these prompts: rows, order and token ids."""

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
        return Prompt(
            row.prompt_id, row.text, tuple(row.tokens.tolist()), row.answer, row.extra, row.messages, row.row_prompt
        )


class PromptDataset:
    """Holds the training prompts, and the order that assigns them to the steps' batches."""

    def __init__(self, prompts: Prompts, order: EpochOrder):
        self.prompts = prompts
        self._order = order

    @classmethod
    def load(cls, config: DataConfig, tokenizer: Tokenizer, *, seed: int) -> "PromptDataset":
        """Reads, checks and tokenizes `config.train`. Raises like RowFile.train."""
        rows, order = PromptFile.train(config, tokenizer, seed)
        _require_few_values(config, rows)
        return cls(Prompts(rows), order)

    @property
    def digest(self) -> str:
        """Returns Prompts.digest."""
        return self.prompts.digest

    def __len__(self) -> int:
        return len(self.prompts)

    def batch(self, step: int) -> list[Prompt]:
        """Returns the `prompts_per_step` prompts of `step`, all distinct. Needs no state to resume.

        Raises:
            ValueError: `step` is negative.
        """
        return [self.prompts[int(index)] for index in self._order.indices(step)]


def load_eval(config: DataConfig, tokenizer: Tokenizer) -> dict[str, Prompts]:
    """Returns the held-out prompts by set name, each set in file order. Raises like RowFile.held_out."""
    held_out = PromptFile.held_out(config, tokenizer)
    for rows in held_out.values():
        _require_few_values(config, rows)
    return {name: Prompts(rows) for name, rows in held_out.items()}


def value_name(value: object) -> str:
    """Returns a value of data.metrics_column as a part of a metric's name, in which a slash would separate parts."""
    return str(value).replace("/", "|")


def _require_few_values(config: DataConfig, rows: Sequence[PromptRow]) -> None:
    column = config.metrics_column
    if column is None:
        return
    values = {value_name(row.extra.get(column)) for row in rows}
    if len(values) > _MOST_VALUES:
        raise InvalidInput(
            f"data.metrics_column: column {column!r} has {len(values)} values, more than {_MOST_VALUES}: name a column "
            "with few values, such as a task or a level",
            field="data.metrics_column",
        )
