"""Reads files of prompts."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pyarrow as pa

from services.common.config.data import DataConfig
from services.coordinator.data.reading.bad_rows import BadRow
from services.coordinator.data.reading.columns import as_messages, is_json, is_prompt, is_text, require
from services.coordinator.data.reading.files import Limits, Row, RowFile, hash_of
from services.coordinator.data.reading.parquet import Record
from services.coordinator.text.chat_template import Message

RowPrompt = str | Sequence[Message]


@dataclass(frozen=True, slots=True)
class PromptRow(Row):
    """Holds a row with its answer, further columns (`extra`) and, once tokenized, its tokens.

    Tokens are an array because a list of ints takes nine times the memory. Rows with a chat template keep their
    messages, and `text` renders them again, because both would take twice the memory.
    """

    answer: str
    extra: dict[str, object]
    render: Callable[[Sequence[Message]], str] | None = None
    messages_json: str = ""
    has_text: bool = True
    """Whether the row's own prompt is text and not messages."""
    has_system: bool = False
    """Whether the first of the messages is the system prompt of the config."""
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint32))

    @property
    def text(self) -> str:
        """Returns the text that was tokenized, after the chat template."""
        return self.render(self.messages) if self.render else self.pieces[0]

    @property
    def messages(self) -> tuple[Message, ...]:
        """Returns the messages before the chat template; without one, a message without a role with the whole text."""
        return tuple(json.loads(self.messages_json)) if self.render else ({"role": "", "content": self.pieces[0]},)

    @property
    def row_prompt(self) -> RowPrompt:
        """Returns the prompt of the row itself, before system prompt and chat template."""
        own = self.messages[self.has_system :]
        return own[0]["content"] if self.has_text else own

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens of the prompt."""
        return len(self.tokens)


class PromptFile(RowFile[DataConfig, PromptRow, PromptRow]):
    """Reads a file with a prompt column, an answer column and extra columns for the scorers."""

    noun = "prompts"

    @classmethod
    def _limits(cls, config: DataConfig) -> Limits:
        per_step, max_tokens = config.prompts_per_step, config.max_prompt_tokens
        return Limits(("prompts_per_step", per_step), ("max_prompt_tokens", max_tokens), config.max_eval_prompts)

    def _check_columns(self) -> pa.DataType:
        prompt, answer, wanted = self.config.prompt_column, self.config.answer_column, self.config.extra_columns
        kind, kind_of_answer = self._type(prompt, "data.prompt_column"), self._type(answer, "data.answer_column")
        others = [name for name in self._table.column_names if name not in (prompt, answer)]
        self._extra = others if wanted is None else wanted
        for name in self._extra:
            problem = "which JSON cannot represent: list the columns to use in data.extra_columns"
            self._require(is_json(self._type(name, "data.extra_columns")), name, self.field, problem)
        if metrics_column := self.config.metrics_column:
            kind_of_value = self._type(metrics_column, "data.metrics_column")
            is_value = (
                is_text(kind_of_value) or pa.types.is_integer(kind_of_value) or pa.types.is_boolean(kind_of_value)
            )
            self._require(is_value, metrics_column, self.field, "not text, integers or booleans")
        self._require(is_prompt(kind), prompt, self.field, "not text or a list of {role, content}")
        self._require(is_text(kind_of_answer), answer, self.field, "not text")
        # Not a method of this object, which would keep the whole file in memory.
        self._render_prompt = partial(self.tokenizer.render, **self.config.chat_template_kwargs)
        return kind

    def _read(self, where: str, number: int, record: Record) -> PromptRow:
        prompt, answer = record[self.config.prompt_column], record[self.config.answer_column]
        extra = {name: record[name] for name in self._extra}
        messages = as_messages(prompt)
        require(answer, "answer")
        try:
            content_hash = hash_of([prompt, answer, extra], allow_nan=False)
        except ValueError as error:
            raise BadRow("an extra column holds NaN or infinity, which is not JSON") from error
        if not self.is_templated:
            return PromptRow(where, number, content_hash, (prompt,), answer, extra)
        messages = self._with_system(messages)
        stored, pieces = json.dumps(messages, ensure_ascii=False), (self._render(messages, is_prompt=True),)
        kind = isinstance(prompt, str), self.config.system_prompt is not None
        return PromptRow(where, number, content_hash, pieces, answer, extra, self._render_prompt, stored, *kind)

    def _example(self, row: PromptRow, pieces: list[list[int]]) -> PromptRow:
        return replace(row, pieces=() if row.render else row.pieces, tokens=np.array(pieces[0], np.uint32))
