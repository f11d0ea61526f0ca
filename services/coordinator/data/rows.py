"""From the rows of a prompt file to checked prompts, not yet tokenised."""

import difflib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from services.common.config.data import DataConfig
from services.common.errors import InvalidInput
from services.coordinator.data.bad_rows import BadRow, BadRows
from services.coordinator.data.chat_template import Message, TemplateRefusal
from services.coordinator.data.parquet import iter_rows, read_table
from services.coordinator.data.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Row:
    """A usable row. `content_hash` is that of the row as stored, whatever the template makes of it."""

    where: str
    number: int
    content_hash: bytes
    text: str
    answer: str
    extra: dict[str, Any]


class PromptFile:
    """One Parquet file, with its columns checked.

    Args:
        path: The file.
        config: Names the columns and says how prompts become text.
        tokenizer: Renders messages.
        field: The config key of `path`, for errors.
        max_rows: Only so many rows from the top.

    Raises:
        NotFound: There is no such file.
        InvalidInput: A column is missing or of a wrong type, or the prompts need a template that is not there.
    """

    def __init__(
        self, path: Path, config: DataConfig, tokenizer: Tokenizer, *, field: str, max_rows: int | None = None
    ):
        self.path, self.config, self.tokenizer, self.field = path, config, tokenizer, field
        self._table = read_table(path, field=field).slice(0, max_rows)
        self._require(config.prompt_column, "data.prompt_column")
        self._require(config.answer_column, "data.answer_column")
        own = (config.prompt_column, config.answer_column)
        wanted = config.extra_columns
        self._extra = [n for n in self._table.column_names if n not in own] if wanted is None else list(wanted)
        for name in self._extra:
            self._require(name, "data.extra_columns")
            self._check_type(name, _is_json(self._type(name)), "which is not JSON: list others in data.extra_columns")
        kind = self._type(config.prompt_column)
        self._check_type(
            config.prompt_column, is_text(kind) or is_messages(kind), "not text or a list of {role, content}"
        )
        self._check_type(config.answer_column, is_text(self._type(config.answer_column)), "not text")
        self.is_templated = config.chat or is_messages(kind)
        """Whether the prompts go through the chat template."""
        self._check_template()

    @property
    def num_rows(self) -> int:
        """Rows read, usable or not."""
        return self._table.num_rows

    def rows(self, bad: BadRows, first_number: int) -> Iterator[Row]:
        """Usable rows in order, numbered from `first_number`; the others are added to `bad`."""
        for index, record in enumerate(iter_rows(self._table)):
            where = f"{self.path} row {index}"
            try:
                yield self._read(where, first_number + index, record)
            except (BadRow, TemplateRefusal) as error:
                bad.add(where, error)

    def _read(self, where: str, number: int, record: dict[str, Any]) -> Row:
        prompt, answer = record[self.config.prompt_column], record[self.config.answer_column]
        extra = {name: record[name] for name in self._extra}
        messages = as_messages(prompt)
        if answer is None or not answer.strip():
            raise BadRow("the answer is null" if answer is None else "the answer is empty")
        try:
            content = json.dumps([prompt, answer, extra], sort_keys=True, ensure_ascii=False, allow_nan=False)
        except ValueError as error:
            raise BadRow("an extra column holds NaN or infinity, which is not JSON") from error
        content_hash = hashlib.blake2b(content.encode(), digest_size=16).digest()
        text = self._render(messages) if self.is_templated else prompt
        return Row(where, number, content_hash, text, answer, extra)

    def _render(self, messages: Sequence[Message]) -> str:
        system = self.config.system_prompt
        if system is not None:
            if messages[0]["role"] == "system":
                raise BadRow("it has a system message, and data.system_prompt is set")
            messages = [{"role": "system", "content": system}, *messages]
        return self.tokenizer.render(messages, **self.config.chat_template_kwargs)

    def _type(self, column: str) -> pa.DataType:
        return self._table.schema.field(column).type

    def _require(self, column: str, key: str) -> None:
        names = self._table.column_names
        if column in names:
            return
        close = difflib.get_close_matches(column, names, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise InvalidInput(f"{key}: {self.path} has no column {column}, only {', '.join(names)}{hint}", field=key)

    def _check_type(self, column: str, is_right: bool, problem: str) -> None:
        if not is_right:
            message = f"{self.field}: column {column} of {self.path} is {self._type(column)}, {problem}"
            raise InvalidInput(message, field=self.field)

    def _check_template(self) -> None:
        if self.is_templated and not self.tokenizer.has_chat_template:
            need = "data.chat is set" if self.config.chat else f"the prompts of {self.path} are messages"
            message = f"{need}, but the model has no chat template: set data.chat_template to a Jinja file"
            raise InvalidInput(message, field="data.chat_template")
        ignored = [key for key in ("system_prompt", "chat_template_kwargs") if getattr(self.config, key)]
        if ignored and not self.is_templated:
            message = f"data.{ignored[0]} is set, but {self.path} has text prompts: set data.chat to template them"
            raise InvalidInput(message, field=f"data.{ignored[0]}")


def as_messages(prompt: str | list[dict[str, Any] | None] | None) -> list[dict[str, Any]]:
    """Messages of a prompt, less the nulls that Parquet puts for keys which a message does not have."""
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise BadRow("the prompt is null" if prompt is None else "the prompt is empty")
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    messages = [{key: value for key, value in (message or {}).items() if value is not None} for message in prompt]
    for index, message in enumerate(messages):
        if missing := {"role", "content"} - message.keys():
            raise BadRow(f"message {index} of the prompt has no {min(missing)}")
    if not messages[-1]["content"].strip():
        raise BadRow("the last message of the prompt is empty")
    if messages[-1]["role"] == "assistant":
        raise BadRow("the prompt ends with an assistant message, which is for the model to write")
    return messages


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type holds text."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def is_messages(kind: pa.DataType) -> bool:
    """Whether a column of this type holds lists of messages."""
    if not _is_list(kind) or not pa.types.is_struct(kind.value_type):
        return False
    types = {field.name: field.type for field in kind.value_type}
    return all(name in types and is_text(types[name]) for name in ("role", "content")) and _is_json(kind)


def _is_json(kind: pa.DataType) -> bool:
    if _is_list(kind):
        return _is_json(kind.value_type)
    if pa.types.is_struct(kind):
        return all(_is_json(field.type) for field in kind)
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return is_number or pa.types.is_boolean(kind) or pa.types.is_null(kind) or is_text(kind)
