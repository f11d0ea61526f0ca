"""Finds the tool calls in the policy's text, which may be anything. Errors in calls are described for the policy."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from services.reward.environments.base import ToolCall

MAX_CALLS = 8
"""Maximum number of calls in one turn. Each further one is answered with an error, up to as many again."""
_MAX_DEPTH = 64
_PYTHON_TAG = "<|python_tag|>"
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class BadCall:
    """Says why a call cannot be made, in words for the policy. The name is empty if it is unknown."""

    name: str
    detail: str


Call = ToolCall | BadCall


def find_calls(syntax: str, text: str, arguments: Mapping[str, str]) -> list[Call]:
    """Returns the calls of a turn in their order.

    Args:
        syntax: hermes, llama3 or tags.
        text: Text of the turn.
        arguments: The only argument of each tool, which syntax tags needs; ignored by the others.
    """
    if syntax == "tags":
        return _limited(_tags(text, arguments))
    return _limited(_PARSERS[syntax](text))


def _hermes(text: str) -> list[Call]:
    calls: list[Call] = []
    for block in text.split(_OPEN)[1 : 2 * MAX_CALLS + 1]:
        body, closed, _ = block.partition(_CLOSE)
        calls.append(_json_call(body) if closed else BadCall("", f"the call has no {_CLOSE}"))
    return calls


def _llama3(text: str) -> list[Call]:
    """Reads objects with `;` between them. Text that does not begin with such an object is an answer, not a call."""
    marked, body = text.lstrip().startswith(_PYTHON_TAG), text.strip().removeprefix(_PYTHON_TAG).strip()
    if not marked and not re.match(r'\{\s*"(name|parameters|type)"', body):
        return []
    calls: list[Call] = []
    while body and len(calls) < 2 * MAX_CALLS:
        try:
            found, end = _DECODER.raw_decode(body)
        except (ValueError, RecursionError) as error:
            return [*calls, _not_json(error)]
        body = body[end:].lstrip()
        if body and not body.startswith(";"):
            return [*calls, BadCall("", "there is text after the JSON object of a call")]
        calls.append(_to_call(found))
        body = body[1:].lstrip()
    return calls


def _tags(text: str, arguments: Mapping[str, str]) -> list[Call]:
    opening = re.compile("<(" + "|".join(map(re.escape, arguments)) + ")>")
    calls: list[Call] = []
    position = 0
    while len(calls) < 2 * MAX_CALLS and (tag := opening.search(text, position)):
        name = tag[1]
        end = text.find(f"</{name}>", tag.end())
        if end < 0:
            return [*calls, BadCall(name, f"the call has no </{name}>")]
        calls.append(ToolCall(name, {arguments[name]: text[tag.end() : end].strip()}))
        position = end
    return calls


_PARSERS: Mapping[str, Callable[[str], list[Call]]] = {"hermes": _hermes, "llama3": _llama3}


def _json_call(body: str) -> Call:
    try:
        return _to_call(_DECODER.decode(body.strip()))
    except (ValueError, RecursionError) as error:
        return _not_json(error)


def _to_call(found: object) -> Call:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return BadCall("", "a call must be a JSON object with the name of a tool")
    name = found["name"].encode(errors="replace").decode()  # JSON may hold half of a surrogate pair
    arguments = found.get("arguments", found.get("parameters", {}))
    if not isinstance(arguments, dict):
        return BadCall(name, "the arguments must be a JSON object")
    if _is_deep(arguments, _MAX_DEPTH):
        return BadCall(name, f"the arguments are nested more than {_MAX_DEPTH} deep")
    return ToolCall(name, arguments)


def _is_deep(value: object, depth: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    entries = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(_is_deep(entry, depth - 1) for entry in entries)


def _limited(calls: list[Call]) -> list[Call]:
    too_many = [BadCall(call.name, f"not called: a turn may have {MAX_CALLS} calls") for call in calls[MAX_CALLS:]]
    return [*calls[:MAX_CALLS], *too_many]


def _not_json(error: Exception) -> BadCall:
    detail = "too deep" if isinstance(error, RecursionError) else str(error)[:200]
    return BadCall("", f"the call is not valid JSON: {detail}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key is set twice")
    return result


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not a finite number")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_number, parse_constant=_number, strict=False)
