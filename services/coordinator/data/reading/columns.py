"""Checks the types of columns and converts their values, which are text or messages."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pyarrow as pa

from services.coordinator.data.reading.record import BadRow, Record, in_words
from services.coordinator.text.chat_template import Message, read_arguments

# As JSON, or as Python and pandas write a list.
_MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:.*\}\s*\]\s*""", re.DOTALL)
_KINDS = {str: "text", list: "a list of messages", (str, list): "text or a list of messages"}


def is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def is_answer(kind: pa.DataType) -> bool:
    """Returns whether a column of this type can hold answers, which scorers get as text."""
    return is_text(kind) or pa.types.is_integer(kind)


def is_messages(kind: pa.DataType) -> bool:
    if not _is_list(kind) or not pa.types.is_struct(kind.value_type):
        return False
    types = {field.name: field.type for field in kind.value_type}
    if not {"role", "content"} <= types.keys() or not is_text(types["role"]) or not is_json(kind):
        return False
    content = types["content"]
    return (
        is_text(content) or pa.types.is_null(content) or (_is_list(content) and pa.types.is_struct(content.value_type))
    )


def is_prompt(kind: pa.DataType) -> bool:
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


def types_with_fields(types: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
    """Returns the types of columns and, as COLUMN.FIELD, of the fields of those that are objects."""
    objects = ((name, kind) for name, kind in types.items() if pa.types.is_struct(kind))
    return {f"{name}.{field.name}": field.type for name, kind in objects for field in kind} | dict(types)


def value_of(record: Record, name: str) -> Any:
    """Returns the value of a column or, for COLUMN.FIELD, of a field of one; None if there is none."""
    column, _, field = name.partition(".")
    if name in record or not isinstance(parent := record.get(column), dict):
        return record.get(name)
    return cast(Record, parent).get(field)


def require(value: object, name: str, kind: type | tuple[type, ...] = str) -> Any:
    """Returns `value`. Raises BadRow if it is null, empty or blank text, or not of `kind`: text, a list, or either."""
    if value is None or value in ("", []) or (isinstance(value, str) and not value.strip()):
        raise BadRow(f"the {name} is {'null' if value is None else 'empty'}")
    if not isinstance(value, kind):
        raise BadRow(f"the {name} is {in_words(value)}, not {_KINDS[kind]}")
    return value


def as_messages(prompt: object, *, may_continue: bool = False) -> list[Message]:
    """Converts a prompt to messages, the last of which is the assistant's only if it `may_continue` that.

    Raises:
        BadRow: It cannot be used.
    """
    value = require(prompt, "prompt", (str, list))
    if isinstance(value, str):
        if _MESSAGES_AS_TEXT.fullmatch(value):
            raise BadRow("the prompt is the text of a list of messages: store the list itself, which CSV cannot hold")
        return [{"role": "user", "content": value}]
    messages = _checked(value, " of the prompt")
    if not messages[-1]["content"].strip():
        raise BadRow("the last message of the prompt is empty")
    if messages[-1]["role"] == "assistant" and not may_continue:
        raise BadRow(
            "the prompt ends with an assistant message, which the model has to write: remove it, or, if it is only the "
            "beginning of an answer, set data.continue_final_message"
        )
    return messages


def as_conversation(value: object) -> list[Message]:
    """Returns the messages up to the last one of the assistant. Raises BadRow if they cannot be used."""
    messages = _checked(require(value, "conversation", list))
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    for index in turns:
        if not messages[index]["content"].strip() and not messages[index].get("tool_calls"):
            raise BadRow(f"the assistant's message {index} is empty")
    if not turns:
        raise BadRow("it has no message of the assistant")
    if turns[0] == 0:
        raise BadRow("it begins with a message of the assistant, before any prompt")
    return messages[: turns[-1] + 1]


def _checked(messages: Sequence[object], whose: str = "") -> list[Message]:
    """Returns messages whose content is text, also of those that have it as OpenAI's API does: in parts, or not at all
    beside calls of tools. Calls that are null are left out: templates ask only whether a message has any.
    """
    checked: list[Message] = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict | None):
            raise BadRow(f"message {index}{whose} is {in_words(message)}, not an object")
        message = {key: value for key, value in (message or {}).items() if key != "tool_calls" or value is not None}
        if isinstance(message.get("content"), list):
            message["content"] = _joined(message["content"], f"message {index}{whose}")
        if calls := message.get("tool_calls"):
            message["content"] = message.get("content") or ""
            _check_calls(calls, f"message {index}{whose}")
        for key in ("content", "role"):
            if message.get(key) is None:
                raise BadRow(f"message {index}{whose} has no {key}")
            if not isinstance(message[key], str):
                raise BadRow(f"the {key} of message {index}{whose} is {in_words(message[key])}, not text")
        checked.append(message)
    return checked


def _check_calls(calls: object, whose: str) -> None:
    """Raises BadRow if the arguments of a tool call, which may be an object or its JSON, are something else."""
    for number, call in enumerate(calls if isinstance(calls, list) else []):
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and read_arguments(function.get("arguments")) is None:
            raise BadRow(f"the arguments of tool call {number} of {whose} are neither an object nor the JSON of one")


def _joined(parts: Sequence[object], whose: str) -> str:
    texts: list[str] = []
    for index, part in enumerate(parts):
        kind = part.get("type", "text") if isinstance(part, dict) else in_words(part)
        text = part.get("text") if isinstance(part, dict) and kind == "text" else None
        if not isinstance(text, str):
            raise BadRow(f"part {index} of {whose} is {kind if kind != 'text' else 'without text'}: only text is read")
        texts.append(text)
    return "".join(texts)
