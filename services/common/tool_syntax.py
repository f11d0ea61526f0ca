# pyright: standard
"""Reads the tool calls in the policy's text, which may be anything. Errors in calls are described for the policy.

Each syntax is a parser that begins at the opening tag of a call and says where the call ends. So a tag within a string
or a value is text, and so is everything between the tags of reasoning.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.common.json_values import JsonMapping

MAX_CALLS = 8  # in one turn. Each further one is answered with an error, up to as many again
THINK = ("<think>", "</think>")
OTHER_REASONING_TAGS = (
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("◁think▷", "◁/think▷"),
)
"""Tags of reasoning, other than the default, that models have tokens for."""
MAX_DEPTH = 64
CALL_TAGS = _OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_SPACE = re.compile(r"\s*")
_CLOSES = re.compile(r"\s*</tool_call>")
_NOTHING = "(?!)"
_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>\n?")
_FUNCTION_END = re.compile(r"\s*</function>\s*</tool_call>")
# A value may hold any of these tags, but not all that end a call in their order.
_VALUE_END = re.compile(r"\n?</parameter>(?=\s*(?:<parameter=[^<>\n]+>|</function>\s*</tool_call>))")


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: Mapping[str, object]


@dataclass(frozen=True)
class BadCall:
    """Why a call cannot be made, in words for the policy. The name is empty if it is unknown."""

    name: str
    detail: str


_UNCLOSED = BadCall("", f"the call has no {_CLOSE}")
Call = ToolCall | BadCall
_Parsed = tuple[list[Call], int]  # calls, and the position where the search for further ones goes on


def find_calls(
    syntax: str, text: str, arguments: Mapping[str, str], tags: Sequence[str] = THINK, *, is_reasoning: bool = False
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
    opening, parse = _SYNTAXES[syntax]
    marks = re.compile(f"(?P<begin>{begin})|(?P<end>{end})|{opening(end, arguments)}")
    calls: list[Call] = []
    position = 0
    while mark := marks.search(turn.text, position):
        position = mark.end()
        if mark["begin"]:
            closing = turn.find(re.compile(end), position)
            position = closing.end() if closing else len(turn.text)
        elif mark["end"]:
            calls.clear()
        elif len(calls) < 2 * MAX_CALLS:
            more, position = parse(turn, mark)
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
        match = None if pattern in self._absent else pattern.search(self.text, position)
        if match is None:
            self._absent.add(pattern)
        return match

    def next_reasoning(self, position: int) -> int:
        """Returns where the next tag of reasoning is, or else the end."""
        match = self.find(self.reasoning, position)
        return match.start() if match else len(self.text)

    def after_broken(self, position: int, *, with_open: bool) -> tuple[bool, int]:
        """Returns whether a broken call is closed, and its end: its closing tag, another call (`with_open`), or a tag
        of reasoning.
        """
        others = f"|{_OPEN}" if with_open else ""
        match = self.find(re.compile(f"(?P<close>{_CLOSE})|{self.reasoning.pattern}{others}"), position)
        if not match:
            return False, len(self.text)
        return bool(match["close"]), match.end() if match["close"] else match.start()


def _hermes(turn: _Turn, opening: re.Match[str]) -> _Parsed:
    begin = _skip_space(turn.text, opening.end())
    try:
        _, end = _SPAN.raw_decode(turn.text, begin)
    except (ValueError, RecursionError) as error:
        at = error.pos if isinstance(error, json.JSONDecodeError) else begin
        # An object that is broken may hold tags within strings; other text mentions the tag rather than calls.
        is_closed, position = turn.after_broken(at, with_open=turn.text[begin : begin + 1] not in ("{", "["))
        return [_not_json(error, begin) if is_closed else _UNCLOSED], position
    if closing := _CLOSES.match(turn.text, end):
        return [_json_call(turn.text[begin:end])], closing.end()
    is_closed, position = turn.after_broken(end, with_open=True)
    return [BadCall("", "the call is not valid JSON: there is text after it") if is_closed else _UNCLOSED], position


def _qwen3_coder(turn: _Turn, opening: re.Match[str]) -> _Parsed:
    """Reads values as text, whatever tags they hold. Only all the tags that end a call, in their order, end it."""
    text = turn.text
    if not (function := _FUNCTION.match(text, opening.end())):
        _, position = turn.after_broken(opening.end(), with_open=True)
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


def _llama3(turn: _Turn, opening: re.Match[str]) -> _Parsed:
    """Reads objects with `;` between them. Text that does not begin with such an object is an answer, not a call.

    So is an object without parameters that no tag marks: Llama 3 is told to write them with every call, even if empty.
    """
    text, position, calls = turn.text, opening.end(), list[Call]()
    is_marked = bool(opening[0].strip())
    while position < len(text) and len(calls) < 2 * MAX_CALLS:
        try:
            value, end = _SPAN.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            return [*calls, _not_json(error, position)], turn.next_reasoning(position)
        if not (calls or is_marked or {"parameters", "arguments"} & value.keys()):
            return [], end
        call, position = _json_call(text[position:end]), _skip_space(text, end)
        if position < len(text) and text[position] != ";" and not turn.reasoning.match(text, position):
            return [*calls, BadCall("", "there is text after the JSON object of a call")], turn.next_reasoning(position)
        calls.append(call)
        if text[position : position + 1] != ";":
            break
        position = _skip_space(text, position + 1)
    return calls, position


def _tags(turn: _Turn, opening: re.Match[str]) -> _Parsed:
    name = opening["name"]
    closing = turn.find(re.compile(re.escape(f"</{name}>")), opening.end())
    if not closing:
        return [BadCall(name, f"the call has no </{name}>")], turn.next_reasoning(opening.end())
    text = turn.text[opening.end() : closing.start()].strip()
    return [ToolCall(name, {turn.arguments[name]: text})], closing.end()


def _json_opening(end: str) -> str:
    """Returns what opens a call of llama3: an object, at the begin of the turn or after its reasoning."""
    after = "" if end == _NOTHING else f"|(?<={end})"
    return rf'(?:\A{after})\s*(?:<\|python_tag\|>\s*|(?=\{{\s*"(?:name|parameters|type)"))'


# For each syntax: the pattern of what opens a call, by the end of reasoning and the tools' names, and the parser.
_SYNTAXES: Mapping[str, tuple[Callable[[str, Iterable[str]], str], Callable[[_Turn, re.Match[str]], _Parsed]]] = {
    "hermes": (lambda end, names: _OPEN, _hermes),
    "qwen3_coder": (lambda end, names: _OPEN, _qwen3_coder),
    "llama3": (lambda end, names: _json_opening(end), _llama3),
    "tags": (lambda end, names: f"<(?P<name>{'|'.join(map(re.escape, names)) or _NOTHING})>", _tags),
}


def _skip_space(text: str, position: int) -> int:
    space = _SPACE.match(text, position)
    return space.end() if space else position


def _json_call(body: str) -> Call:
    try:
        return _to_call(read_json(body))
    except (ValueError, RecursionError) as error:
        return _not_json(error, 0)


def read_json(text: str) -> object:
    """Raises ValueError if a key is set twice or a number is not finite, RecursionError if it is too deep."""
    return _DECODER.decode(text)


def is_deep(value: object, depth: int = MAX_DEPTH) -> bool:
    """Returns whether a value is nested more than `depth` deep."""
    if not isinstance(value, dict | list):
        return False
    entries = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(is_deep(entry, depth - 1) for entry in entries)


def _to_call(value: object) -> Call:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return BadCall("", "a call must be a JSON object with the name of a tool")
    name = value["name"].encode(errors="replace").decode()  # JSON may hold half of a surrogate pair
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return BadCall(name, "the arguments must be a JSON object")
    if is_deep(arguments):
        return BadCall(name, f"the arguments are nested more than {MAX_DEPTH} deep")
    return ToolCall(name, arguments)


def _not_json(error: Exception, begin: int) -> BadCall:
    """Returns the error of a JSON text that begins at `begin` of what was read."""
    detail = "too deep" if isinstance(error, RecursionError) else str(error)[:200]
    if isinstance(error, json.JSONDecodeError):
        detail = f"{error.msg} at character {error.pos - begin}"
    return BadCall("", f"the call is not valid JSON: {detail}")


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
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

Schema = JsonMapping
_CLASSES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "object": (dict,),
    "array": (list,), "null": (type(None),),
}  # fmt: skip
# Chat templates that show values as Python does write these for true, false and null.
_PYTHON_LITERALS: Mapping[str, object] = {"True": True, "False": False, "None": None}


def read_texts(texts: Mapping[str, object], parameters: Schema) -> Mapping[str, object]:
    """Returns arguments that were written as texts, of the types of the schema, which may be that of another server.

    A text stays as it is if its parameter takes texts and the text is no value of another type that it takes too, or if
    it is no value of any type that it takes.
    """
    properties = parameters.get("properties")
    schemas: JsonMapping = properties if isinstance(properties, Mapping) else {}
    return {name: _read_text(str(text), schemas.get(name, {})) for name, text in texts.items()}


def _read_text(text: str, schema: Schema) -> object:
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return text
    try:
        literal = text.strip()
        value = _PYTHON_LITERALS[literal] if literal in _PYTHON_LITERALS else read_json(literal)
    except (ValueError, RecursionError):
        return text
    is_typed = not isinstance(value, str) and any(fits(value, {"type": kind}) for kind in kinds)
    return value if is_typed and not is_deep(value) else text


def _kinds(schema: Schema) -> set[str]:
    """Returns the names of the types that a schema allows; all if it does not say, or not as JSON schema has it."""
    if not isinstance(schema, Mapping):  # `true` allows everything
        return set(_CLASSES)
    options = schema.get("anyOf") or schema.get("oneOf")
    if options and isinstance(options, list):
        return set().union(*map(_kinds, options))
    if isinstance(values := schema.get("enum"), list):
        return {kind for value in values for kind in _CLASSES if fits(value, {"type": kind})}
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return {kinds}
    return {kind for kind in kinds if isinstance(kind, str)} if isinstance(kinds, list) else set(_CLASSES)


def is_option(value: object, option: object) -> bool:
    """Returns whether a value is the `option` of an enum; 3.0 is 3, and True is not 1."""
    return value == option and (type(value) is type(option) or (type(value) is float and type(option) is int))


def fits(value: object, schema: Schema) -> bool:
    """Returns whether a value fits a JSON schema, of which it knows the parts that functions have."""
    if "anyOf" in schema:
        return any(fits(value, option) for option in schema["anyOf"])
    if "enum" in schema:
        return any(is_option(value, option) for option in schema["enum"])
    kind = schema.get("type")
    if kind is None:
        return True
    if isinstance(value, float) and kind == "integer":
        return value.is_integer()
    if (isinstance(value, bool) and kind != "boolean") or not isinstance(value, _CLASSES.get(kind, ())):
        return False
    if isinstance(value, list):
        return all(fits(entry, schema.get("items", {})) for entry in value)
    if isinstance(value, dict) and "additionalProperties" in schema:
        return all(fits(entry, schema["additionalProperties"]) for entry in value.values())
    return True
