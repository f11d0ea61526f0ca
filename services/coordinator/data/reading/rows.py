"""Files of prompts: their columns are checked, and each row becomes a prompt with answer and extra columns."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import numpy as np
import pyarrow as pa

from services.common.config.data import DataConfig
from services.coordinator.data.reading.columns import (
    as_messages,
    is_answer,
    is_json,
    is_prompt,
    is_text,
    require,
    types_with_fields,
    value_of,
)
from services.coordinator.data.reading.files import Row, RowFile, hash_of, require_messages_shown
from services.coordinator.data.reading.record import BadRow, Record, in_words
from services.coordinator.text.chat_template import Message

RowPrompt = str | Sequence[Message]


@dataclass(frozen=True, slots=True)
class PromptRow(Row):
    """A row with its answer, further columns (`extra`) and, once tokenized, its tokens.

    Tokens are an array because a list of ints takes nine times the memory; further columns are text because objects
    take several times the memory. Rows with a chat template keep their messages, and `text` renders them again, because
    both would take twice the memory.
    """

    answer: str | None
    extra_json: str
    render: Callable[[Sequence[Message]], str] | None = None
    messages_json: str = ""
    has_text: bool = True
    """Whether the row's own prompt is text and not messages."""
    answer_is_integer: bool = False
    """Whether the file has the answer as an integer, of which `answer` is the text."""
    has_system: bool = False
    """Whether the first of the messages is the system prompt of the config."""
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint32))

    @property
    def extra(self) -> dict[str, object]:
        return json.loads(self.extra_json)

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
        return len(self.tokens)


class PromptFile(RowFile[DataConfig, PromptRow, PromptRow]):
    """A file with a prompt column, an answer column and extra columns for the scorers."""

    noun, keys = "prompts", ("prompts_per_step", "max_prompt_tokens", "max_eval_prompts")
    needs_answer: ClassVar[bool] = True
    """Whether every row must have an answer."""

    def _check_columns(self) -> pa.DataType:
        prompt, answer, wanted = self.config.prompt_column, self.config.answer_column, self.config.extra_columns
        kind, types = self._type(prompt, "data.prompt_column"), self._file.types
        if self.needs_answer:
            key, other = "data.answer_column", "convert it, or name another column, and read this one from extra"
            self._require(is_answer(self._type(answer, key)), answer, key, f"not text or integers: {other}")
        # A column that is no answer, and need not be, is a column like any other.
        found = types_with_fields(types).get(answer)
        self._answer = answer if self.needs_answer or (found and is_answer(found)) else None
        self._extra = wanted
        for name in [name for name in types if name not in (prompt, self._answer)] if wanted is None else wanted:
            key, problem = "data.extra_columns", "which JSON cannot represent: list the columns to use"
            self._require(is_json(self._type(name, key)), name, key, problem)
        if metrics_column := self.config.metrics_column:
            kind_of_value = self._type(metrics_column, "data.metrics_column")
            is_value = (
                is_text(kind_of_value) or pa.types.is_integer(kind_of_value) or pa.types.is_boolean(kind_of_value)
            )
            self._require(is_value, metrics_column, self.field, "not text, integers or booleans")
        self._require(is_prompt(kind), prompt, self.field, "not text or a list of {role, content}")
        # Not a method of this object, which would keep the whole file in memory.
        self._render_prompt = partial(self.tokenizer.render_prompt, **self.config.chat_template_kwargs)
        return kind

    def _read(self, where: str, number: int, record: Record) -> PromptRow:
        names = self.config.prompt_column, self._answer
        prompt, answer = (None if name is None else value_of(record, name) for name in names)
        if answer_is_integer := type(answer) is int:  # which True and False are not
            answer = str(answer)
        others = [name for name in record if name not in names] if self._extra is None else self._extra
        extra = {name: record[name] for name in others if name in record}
        messages = as_messages(prompt, may_continue=self.config.continue_final_message)
        if self.needs_answer or not isinstance(answer, str | None):
            require(answer, "answer")
        column = self.config.metrics_column
        if column and not isinstance(value := extra.get(column), str | int | None):
            is_wrong = f"is {in_words(value)}, not text, an integer or a boolean"
            raise BadRow(f"column {column}, data.metrics_column, {is_wrong}")
        content_hash = _hash([prompt, answer, extra], {names[0]: prompt, self.config.answer_column: answer} | extra)
        has_text = isinstance(prompt, str)
        if not self.is_templated and not has_text:
            raise BadRow("the prompt is a list, but the file's first one is text: set data.chat to have both")
        if self.is_templated and has_text and not self.config.chat:
            raise BadRow("the prompt is text, but the file's first one is a list: set data.chat to have both")
        text = messages[0]["content"]  # of a prompt that is text, the whole
        row = PromptRow(
            where, number, content_hash, (text,), answer, json.dumps(extra), answer_is_integer=answer_is_integer
        )
        if not self.is_templated:
            return row
        messages = self._with_system(messages)
        require_messages_shown(self._render_prompt, messages)
        return replace(
            row,
            pieces=(self._render_prompt(messages),),
            render=self._render_prompt,
            messages_json=json.dumps(messages, ensure_ascii=False),
            has_text=has_text,
            has_system=self.config.system_prompt is not None,
        )

    def _example(self, row: PromptRow, pieces: list[list[int]]) -> PromptRow:
        return replace(row, pieces=() if row.render else row.pieces, tokens=np.array(pieces[0], np.uint32))


def _hash(stored: object, columns: Record) -> bytes:
    """Returns hash_of(stored). If it cannot be stored, names the column of `columns` that is the reason."""
    try:
        return hash_of(stored)
    except BadRow:
        for name, value in columns.items():
            hash_of(value, f"column {name}")
        raise


class AnswerlessFile(PromptFile):
    """A file whose rows need no answer, because no scorer reads it."""

    needs_answer = False
