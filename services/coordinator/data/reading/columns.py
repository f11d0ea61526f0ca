"""Checks the types of columns and converts their values, which are text or messages."""

from collections.abc import Sequence
from typing import TypeVar

import pyarrow as pa

from services.coordinator.data.reading.bad_rows import BadRow
from services.coordinator.text.chat_template import Message

Value = TypeVar("Value")


def is_text(kind: pa.DataType) -> bool:
    """Returns whether a column of this type holds text."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def is_messages(kind: pa.DataType) -> bool:
    """Returns whether a column of this type holds lists of messages."""
    if not _is_list(kind) or not pa.types.is_struct(kind.value_type):
        return False
    types = {field.name: field.type for field in kind.value_type}
    return all(name in types and is_text(types[name]) for name in ("role", "content")) and is_json(kind)


def is_prompt(kind: pa.DataType) -> bool:
    """Returns whether a column of this type can hold prompts."""
    return is_text(kind) or is_messages(kind)


def is_json(kind: pa.DataType) -> bool:
    """Returns whether the values of a column of this type can be written as JSON."""
    if _is_list(kind):
        return is_json(kind.value_type)
    if pa.types.is_struct(kind):
        return all(is_json(field.type) for field in kind)
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return is_number or pa.types.is_boolean(kind) or pa.types.is_null(kind) or is_text(kind)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def require(value: Value | None, name: str) -> Value:
    """Returns `value`. Raises BadRow if it is null, empty or blank text."""
    if not value or (isinstance(value, str) and not value.strip()):
        raise BadRow(f"the {name} is {'null' if value is None else 'empty'}")
    return value


def as_messages(prompt: str | Sequence[Message | None] | None) -> list[Message]:
    """Converts a prompt to messages. Raises BadRow if it cannot be used."""
    prompt = require(prompt, "prompt")
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    messages = _without_nulls(prompt, " of the prompt")
    if not messages[-1]["content"].strip():
        raise BadRow("the last message of the prompt is empty")
    if messages[-1]["role"] == "assistant":
        raise BadRow("the prompt ends with an assistant message, but the model has to write that")
    return messages


def as_conversation(value: Sequence[Message | None] | None) -> list[Message]:
    """Returns the messages up to the last one of the assistant. Raises BadRow if they cannot be used."""
    messages = _without_nulls(require(value, "conversation"))
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    for index in turns:
        if not messages[index]["content"].strip():
            raise BadRow(f"the assistant's message {index} is empty")
    if not turns:
        raise BadRow("it has no message of the assistant")
    if turns[0] == 0:
        raise BadRow("it begins with a message of the assistant, before any prompt")
    return messages[: turns[-1] + 1]


def _without_nulls(messages: Sequence[Message | None], whose: str = "") -> list[Message]:
    """Removes the null values that Parquet stores for keys that a message does not have."""
    kept: list[Message] = [
        {key: value for key, value in (message or {}).items() if value is not None} for message in messages
    ]
    for index, message in enumerate(kept):
        if missing := {"role", "content"} - message.keys():
            raise BadRow(f"message {index}{whose} has no {min(missing)}")
    return kept
