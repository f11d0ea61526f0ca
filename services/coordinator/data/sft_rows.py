"""From the rows of a supervised file to texts, of which the assistant's are trained on. Not yet tokenised."""

import difflib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from services.common.config.sft import SftDataConfig
from services.common.errors import InvalidInput
from services.coordinator.data.bad_rows import BadRow, BadRows
from services.coordinator.data.chat_template import Message, TemplateRefusal
from services.coordinator.data.parquet import iter_rows, read_table
from services.coordinator.data.prefix_stable import check_prefix_stable
from services.coordinator.data.rows import as_messages, is_messages, is_text
from services.coordinator.data.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class SftRow:
    """A usable row. `content_hash` is that of the row as stored, whatever the template makes of it.

    `pieces` are prompt, answer, what comes between, answer, and so on: each is tokenised by itself, as the prompt is
    when the model answers.
    """

    where: str
    number: int
    content_hash: bytes
    pieces: tuple[str, ...]


class SftFile:
    """One Parquet file, with its columns checked.

    Args:
        path: The file.
        config: Names the columns and says how rows become text.
        tokenizer: Renders messages.
        field: The config key of `path`, for errors.
        max_rows: Only so many rows from the top.

    Raises:
        NotFound: There is no such file.
        InvalidInput: A column is missing or of a wrong type, or the rows need a template that is not there.
    """

    def __init__(
        self, path: Path, config: SftDataConfig, tokenizer: Tokenizer, *, field: str, max_rows: int | None = None
    ):
        self.path, self.config, self.tokenizer, self.field = path, config, tokenizer, field
        self._table = read_table(path, field=field).slice(0, max_rows)
        if config.messages_column:
            kind = self._type("messages_column")
            self._require(is_messages(kind), "messages_column", "not a list of {role, content}")
        else:
            kind = self._type("prompt_column")
            is_known = is_text(kind) or is_messages(kind)
            self._require(is_known, "prompt_column", "not text or a list of {role, content}")
            self._require(is_text(self._type("response_column")), "response_column", "not text")
        self.is_templated = config.chat or is_messages(kind)
        """Whether the rows go through the chat template."""
        self._check_template()

    @property
    def num_rows(self) -> int:
        """Rows read, usable or not."""
        return self._table.num_rows

    def rows(self, bad: BadRows, first_number: int) -> Iterator[SftRow]:
        """Usable rows in order, numbered from `first_number`; the others are added to `bad`.

        Raises:
            InvalidInput: The chat template does not leave earlier turns as they were.
        """
        for index, record in enumerate(iter_rows(self._table)):
            where = f"{self.path} row {index}"
            try:
                yield self._read(where, first_number + index, record)
            except (BadRow, TemplateRefusal) as error:
                bad.add(where, error)
            except InvalidInput as error:
                raise InvalidInput(f"{where}: {error.message}", **error.metadata) from error

    def _read(self, where: str, number: int, record: dict[str, Any]) -> SftRow:
        config = self.config
        if config.messages_column:
            content = record[config.messages_column]
            messages = _as_conversation(content)
        else:
            prompt, response = record[config.prompt_column], record[config.response_column]
            content = [prompt, response]
            if response is None or not response.strip():
                raise BadRow("the response is null" if response is None else "the response is empty")
            messages = [*as_messages(prompt), {"role": "assistant", "content": response}]
        pieces = self._pieces(messages) if self.is_templated else tuple(message["content"] for message in messages)
        stored = json.dumps(content, sort_keys=True, ensure_ascii=False)
        return SftRow(where, number, hashlib.blake2b(stored.encode(), digest_size=16).digest(), pieces)

    def _pieces(self, messages: Sequence[Message]) -> tuple[str, ...]:
        """Texts of a conversation, which ends with the assistant's turn; every second one is trained on."""
        if system := self.config.system_prompt:
            if messages[0]["role"] == "system":
                raise BadRow("it has a system message, and data.system_prompt is set")
            messages = [{"role": "system", "content": system}, *messages]
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if self.config.train_on == "last" or not self.config.messages_column:
            turns = turns[-1:]
        whole = self._render(messages, is_prompt=False)
        pieces: list[str] = []
        end = 0
        for turn in turns:
            prompt, turns_end = self._render(messages[:turn], is_prompt=True), whole
            if turn < len(messages) - 1:
                turns_end = self._render(messages[: turn + 1], is_prompt=False)
            if not (whole.startswith(turns_end) and turns_end.startswith(prompt) and len(prompt) >= end):
                check_prefix_stable(self.tokenizer, messages, **self.config.chat_template_kwargs)
                raise BadRow(f"the chat template does not put message {turn} after the messages before it")
            pieces += [whole[end : len(prompt)], whole[len(prompt) : len(turns_end)]]
            end = len(turns_end)
        return tuple(pieces)

    def _render(self, messages: Sequence[Message], *, is_prompt: bool) -> str:
        variables = self.config.chat_template_kwargs
        return self.tokenizer.render(messages, add_generation_prompt=is_prompt, **variables)

    def _type(self, key: str) -> pa.DataType:
        column, names = getattr(self.config, key), self._table.column_names
        if column in names:
            return self._table.schema.field(column).type
        close = difflib.get_close_matches(column, names, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise InvalidInput(
            f"data.{key}: {self.path} has no column {column}, only {', '.join(names)}{hint}", field=f"data.{key}"
        )

    def _require(self, is_right: bool, key: str, problem: str) -> None:
        if not is_right:
            column = getattr(self.config, key)
            message = f"data.{key}: column {column} of {self.path} is {self._type(key)}, {problem}"
            raise InvalidInput(message, field=f"data.{key}")

    def _check_template(self) -> None:
        if self.is_templated and not self.tokenizer.has_chat_template:
            need = "data.chat is set" if self.config.chat else f"the rows of {self.path} are messages"
            message = f"{need}, but the model has no chat template: set data.chat_template to a Jinja file"
            raise InvalidInput(message, field="data.chat_template")
        ignored = [key for key in ("system_prompt", "chat_template_kwargs") if getattr(self.config, key)]
        if ignored and not self.is_templated:
            message = f"data.{ignored[0]} is set, but {self.path} has text prompts: set data.chat to template them"
            raise InvalidInput(message, field=f"data.{ignored[0]}")


def _as_conversation(value: list[dict[str, Any] | None] | None) -> list[dict[str, Any]]:
    """Messages up to the assistant's last, less the nulls that Parquet puts for keys which a message does not have."""
    if not value:
        raise BadRow("the conversation is null" if value is None else "the conversation is empty")
    messages = [{key: part for key, part in (message or {}).items() if part is not None} for message in value]
    for index, message in enumerate(messages):
        if missing := {"role", "content"} - message.keys():
            raise BadRow(f"message {index} has no {min(missing)}")
        if message["role"] == "assistant" and not message["content"].strip():
            raise BadRow(f"message {index}, the assistant's, is empty")
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise BadRow("no message is the assistant's")
    if turns[0] == 0:
        raise BadRow("it begins with the assistant's message, which answers nothing")
    return messages[: turns[-1] + 1]
