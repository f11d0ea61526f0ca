"""Reads the tool calls in the policy's text, which may be anything. Errors in calls are described for the policy.

Each syntax is a parser that begins at the opening tag of a call and says where the call ends. So a tag within a string
or a value is text, and so is everything between the tags of reasoning.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.reward.environments.base import ToolCall

MAX_CALLS = 8
"""Maximum number of calls in one turn. Each further one is answered with an error, up to as many again."""
THINK = ("<think>", "</think>")
"""Tags between which most models reason."""
_MAX_DEPTH = 64
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_SPACE = re.compile(r"\s*")
_CLOSES = re.compile(r"\s*</tool_call>")
_NOTHING = "(?!)"
_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>\n?")
_FUNCTION_END = re.compile(r"\s*</function>\s*</tool_call>")
# A value may hold any of these tags, but not all that end a call in their order.
_VALUE_END = re.compile(r"\n?</parameter>(?=\s*(?:<parameter=[^<>\n]+>|</function>\s*</tool_call>))")


@dataclass(frozen=True)
class BadCall:
    """Says why a call cannot be made, in words for the policy. The name is empty if it is unknown."""

    name: str
    detail: str


Call = ToolCall | BadCall
_Parsed = tuple[list[Call], int]
"""Calls, and the position where the search for further ones goes on."""


def find_calls(
    syntax: str,
    text: str,
    arguments: Mapping[str, str],
    tags: Sequence[str] = THINK,
    *,
    is_reasoning: bool = False,
) -> list[Call]:
    """Returns the calls of a turn in their order. With syntax qwen3_coder, all arguments are texts.

    Args:
        syntax: hermes, qwen3_coder, llama3 or tags.
        text: Text of the turn.
        arguments: The only argument of each tool, which syntax tags needs; ignored by the others.
        tags: Begin and end of reasoning, in which nothing is a call. None, if the policy calls tools while it reasons.
        is_reasoning: Whether the text begins within reasoning. If not, an end without a begin still makes all text
            before it reasoning.
    """
    begin, end = map(re.escape, tags) if tags else (_NOTHING, _NOTHING)
    turn = _Turn(f"{tags[0]}{text}" if tags and is_reasoning else text, re.compile(f"{begin}|{end}"), arguments)
    opening, parse = _OPENINGS[syntax](end, arguments), _PARSERS[syntax]
    marks = re.compile(f"(?P<begin>{begin})|(?P<end>{end})|{opening}")
    calls: list[Call] = []
    position = 0
    while found := marks.search(turn.text, position):
        position = found.end()
        if found["begin"]:
            closing = turn.find(re.compile(end), position)
            position = closing.end() if closing else len(turn.text)
        elif found["end"]:
            calls.clear()
        elif len(calls) < 2 * MAX_CALLS:
            more, position = parse(turn, found)
            calls += more
    del calls[2 * MAX_CALLS :]
    too_many = [BadCall(call.name, f"not called: a turn may have {MAX_CALLS} calls") for call in calls[MAX_CALLS:]]
    return [*calls[:MAX_CALLS], *too_many]


class _Turn:
    """Searches a text from left to right, in linear time: what was not found once is not searched again."""

    def __init__(self, text: str, reasoning: re.Pattern[str], arguments: Mapping[str, str]):
        self.text, self.reasoning, self.arguments = text, reasoning, arguments
        self._absent: set[re.Pattern[str]] = set()

    def find(self, pattern: re.Pattern[str], position: int) -> re.Match[str] | None:
        found = None if pattern in self._absent else pattern.search(self.text, position)
        if found is None:
            self._absent.add(pattern)
        return found

    def next_reasoning(self, position: int) -> int:
        """Returns where the next tag of reasoning is, or else the end."""
        found = self.find(self.reasoning, position)
        return found.start() if found else len(self.text)

    def after_broken(self, position: int, *, with_open: bool) -> tuple[bool, int]:
        """Returns whether a broken call is closed, and its end: its closing tag, another call (`with_open`), or a tag
        of reasoning.
        """
        others = f"|{_OPEN}" if with_open else ""
        found = self.find(re.compile(f"(?P<close>{_CLOSE})|{self.reasoning.pattern}{others}"), position)
        if not found:
            return False, len(self.text)
        return bool(found["close"]), found.end() if found["close"] else found.start()


def _hermes(turn: _Turn, found: re.Match[str]) -> _Parsed:
    begin = _skip_space(turn.text, found.end())
    try:
        _, end = _SPAN.raw_decode(turn.text, begin)
    except (ValueError, RecursionError) as error:
        at = error.pos if isinstance(error, json.JSONDecodeError) else begin
        # An object that is broken may hold tags within strings; other text mentions the tag rather than calls.
        is_closed, position = turn.after_broken(at, with_open=turn.text[begin : begin + 1] not in ("{", "["))
        return [_not_json(error, begin) if is_closed else _unclosed()], position
    if closing := _CLOSES.match(turn.text, end):
        return [_json_call(turn.text[begin:end])], closing.end()
    is_closed, position = turn.after_broken(end, with_open=True)
    return [BadCall("", "the call is not valid JSON: there is text after it") if is_closed else _unclosed()], position


def _qwen3_coder(turn: _Turn, found: re.Match[str]) -> _Parsed:
    """Reads values as text, whatever tags they hold. Only all the tags that end a call, in their order, end it."""
    text = turn.text
    if not (function := _FUNCTION.match(text, found.end())):
        _, position = turn.after_broken(found.end(), with_open=True)
        return [BadCall("", f"{_OPEN} must be followed by <function=NAME>")], position
    name, position, arguments = function[1].strip(), function.end(), dict[str, object]()
    while parameter := _PARAMETER.match(text, position):
        value_end, key = turn.find(_VALUE_END, parameter.end()), parameter[1].strip()
        if not value_end:
            detail = f"parameter {key[:100]} must end with </parameter>, and the call with </function> and {_CLOSE}"
            return [BadCall(name, detail)], turn.next_reasoning(parameter.end())
        position = value_end.end()
        if key in arguments:
            position = turn.after_broken(position, with_open=True)[1]
            return [BadCall(name, f"parameter {key[:100]} is set twice")], position
        arguments[key] = text[parameter.end() : value_end.start()]
    if closing := _FUNCTION_END.match(text, position):
        return [ToolCall(name, arguments)], closing.end()
    detail = f"after <function={name[:100]}> must come <parameter=NAME>, or </function> and {_CLOSE}"
    return [BadCall(name, detail)], turn.after_broken(position, with_open=True)[1]


def _llama3(turn: _Turn, found: re.Match[str]) -> _Parsed:
    """Reads objects with `;` between them. Text that does not begin with such an object is an answer, not a call."""
    text, position, calls = turn.text, found.end(), list[Call]()
    while position < len(text) and len(calls) < 2 * MAX_CALLS:
        try:
            _, end = _SPAN.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            return [*calls, _not_json(error, position)], turn.next_reasoning(position)
        call, position = _json_call(text[position:end]), _skip_space(text, end)
        if position < len(text) and text[position] != ";" and not turn.reasoning.match(text, position):
            return [*calls, BadCall("", "there is text after the JSON object of a call")], turn.next_reasoning(position)
        calls.append(call)
        if text[position : position + 1] != ";":
            break
        position = _skip_space(text, position + 1)
    return calls, position


def _tags(turn: _Turn, found: re.Match[str]) -> _Parsed:
    name = found["name"]
    closing = turn.find(re.compile(re.escape(f"</{name}>")), found.end())
    if not closing:
        return [BadCall(name, f"the call has no </{name}>")], turn.next_reasoning(found.end())
    text = turn.text[found.end() : closing.start()].strip()
    return [ToolCall(name, {turn.arguments[name]: text})], closing.end()


def _json_opening(end: str, arguments: Mapping[str, str]) -> str:
    """Returns what opens a call of llama3: an object, at the begin of the turn or after its reasoning."""
    after = "" if end == _NOTHING else f"|(?<={end})"
    return rf'(?:\A{after})\s*(?:<\|python_tag\|>\s*|(?=\{{\s*"(?:name|parameters|type)"))'


def _tag_opening(end: str, arguments: Mapping[str, str]) -> str:
    return f"<(?P<name>{'|'.join(map(re.escape, arguments)) or _NOTHING})>"


def _call_opening(end: str, arguments: Mapping[str, str]) -> str:
    return _OPEN


_OPENINGS: Mapping[str, Callable[[str, Mapping[str, str]], str]] = {
    "hermes": _call_opening, "qwen3_coder": _call_opening, "llama3": _json_opening, "tags": _tag_opening,
}  # fmt: skip
_PARSERS: Mapping[str, Callable[[_Turn, re.Match[str]], _Parsed]] = {
    "hermes": _hermes, "qwen3_coder": _qwen3_coder, "llama3": _llama3, "tags": _tags,
}  # fmt: skip


def _skip_space(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    return found.end() if found else position


def _json_call(body: str) -> Call:
    try:
        return _to_call(read_json(body))
    except (ValueError, RecursionError) as error:
        return _not_json(error, 0)


def read_json(text: str) -> object:
    """Returns the value of a JSON text.

    Raises:
        ValueError: It is none, sets a key twice, or holds a number that is not finite or too long.
        RecursionError: It is nested too deeply.
    """
    return _DECODER.decode(text)


def is_deep(value: object, depth: int = _MAX_DEPTH) -> bool:
    """Returns whether a value is nested more than `depth` deep."""
    if not isinstance(value, dict | list):
        return False
    entries = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(is_deep(entry, depth - 1) for entry in entries)


def _to_call(found: object) -> Call:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return BadCall("", "a call must be a JSON object with the name of a tool")
    name = found["name"].encode(errors="replace").decode()  # JSON may hold half of a surrogate pair
    arguments = found.get("arguments", found.get("parameters", {}))
    if not isinstance(arguments, dict):
        return BadCall(name, "the arguments must be a JSON object")
    if is_deep(arguments):
        return BadCall(name, f"the arguments are nested more than {_MAX_DEPTH} deep")
    return ToolCall(name, arguments)


def _unclosed() -> BadCall:
    return BadCall("", f"the call has no {_CLOSE}")


def _not_json(error: Exception, begin: int) -> BadCall:
    """Returns the error of a JSON text that begins at `begin` of what was read."""
    detail = "too deep" if isinstance(error, RecursionError) else str(error)[:200]
    if isinstance(error, json.JSONDecodeError):
        detail = f"{error.msg} at character {error.pos - begin}"
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
# Finds the end of a value whose content may be refused.
_SPAN = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str, strict=False)
