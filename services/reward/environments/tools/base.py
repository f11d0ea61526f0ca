"""Defines the interface of tools."""

import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

from services.common.json_values import JsonObject
from services.common.tool_syntax import Schema, fits, is_option

_TYPES: Mapping[object, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    dict: "object",
    list: "array",
}


def tool_schema(name: str, description: str, parameters: Schema) -> Schema:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def text_tool_schema(name: str, description: str, argument: str, meaning: str) -> Schema:
    properties = {argument: {"type": "string", "description": meaning}}
    return tool_schema(name, description, {"type": "object", "properties": properties, "required": [argument]})


def function_schema(function: Callable[..., object]) -> Schema:
    """Returns the schema of a function, from its signature and docstring (Google style).

    Raises TypeError if it takes arguments that have no name, or of a type that JSON cannot hold.
    """
    hints = typing.get_type_hints(function, include_extras=True)
    summary, meanings = _read_docstring(inspect.getdoc(function) or "")
    properties: dict[str, object] = {}
    required = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{parameter} of {function.__name__}: a tool's arguments must be given by name")
        hint = hints.get(parameter.name, Any)
        try:
            schema = _type_schema(hint)
        except TypeError as error:
            raise TypeError(f"{parameter.name} of {function.__name__}: {error}") from None
        if parameter.default is None and schema and not fits(None, schema):
            schema = {"anyOf": [schema, {"type": "null"}]}
        annotations = typing.get_args(hint)[1:] if typing.get_origin(hint) is typing.Annotated else ()
        meaning = meanings.get(parameter.name) or next((one for one in annotations if isinstance(one, str)), None)
        properties[parameter.name] = {**schema, "description": meaning} if meaning else schema
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return tool_schema(function.__name__, summary, parameters)


def only_text_argument(schema: Schema) -> str | None:
    """Returns the name of the argument that a text can be given to: the only one, or the only required one."""
    parameters = schema["function"]["parameters"]
    properties = parameters.get("properties", {})
    names = list(properties) if len(properties) == 1 else parameters.get("required", [])
    if len(names) != 1 or properties[names[0]].get("type", "string") != "string":
        return None
    return names[0]


def find_fault(arguments: Mapping[str, object], parameters: Schema) -> str:
    """Returns the error in arguments, or an empty text. Knows the parts of JSON schema that are made here."""
    properties = parameters["properties"]
    if missing := [name for name in parameters["required"] if name not in arguments]:
        return f"missing argument {missing[0]}"
    if unknown := [name for name in arguments if name not in properties]:
        return f"unknown argument {unknown[0][:100]!r}: there are {', '.join(properties) or 'none'}"
    for name, value in arguments.items():
        if not fits(value, properties[name]) and not _is_left_out(name, value, parameters):
            return f"argument {name} must be {_describe(properties[name])}"
    return ""


def fitted(arguments: Mapping[str, object], parameters: Schema) -> Mapping[str, object]:
    """Returns arguments without a fault as the function takes them: 3.0 is 3 where the schema wants an integer, and a
    null for a parameter that has a default and takes no null leaves it out.
    """
    return {
        name: _fit(value, parameters["properties"][name])
        for name, value in arguments.items()
        if not _is_left_out(name, value, parameters)
    }


def _is_left_out(name: str, value: object, parameters: Schema) -> bool:
    is_optional = name not in parameters["required"]
    return value is None and is_optional and not fits(None, parameters["properties"][name])


def _fit(value: object, schema: Schema) -> object:
    """Returns a value that fits the schema, with integers where it wants them."""
    if "anyOf" in schema:
        fitted_values = [_fit(value, option) for option in schema["anyOf"] if fits(value, option)]
        return next((fit for fit in fitted_values if type(fit) is type(value)), fitted_values[0])
    if "enum" in schema:
        return next(option for option in schema["enum"] if is_option(value, option))
    if isinstance(value, list):
        return [_fit(entry, schema.get("items", {})) for entry in value]
    if isinstance(value, dict):
        return {key: _fit(entry, schema.get("additionalProperties", {})) for key, entry in value.items()}
    return int(value) if isinstance(value, float) and schema.get("type") == "integer" else value


def _describe(schema: Schema) -> str:
    if "anyOf" in schema:
        return " or ".join(map(_describe, schema["anyOf"]))
    if "enum" in schema:
        return "one of " + ", ".join(map(str, schema["enum"]))
    items = f" of {_describe(schema['items'])}" if schema.get("items") else ""
    return schema["type"] + items


def _type_schema(hint: Any) -> JsonObject:
    if hint is Any:
        return {}
    if hint is type(None):
        return {"type": "null"}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:  # first, because its metadata may have no hash
        return _type_schema(arguments[0])
    plain = origin if origin and not arguments else hint  # List and Dict of typing without types
    if plain in _TYPES:
        return {"type": _TYPES[plain]}
    if origin is Literal:
        (kind, *others) = {type(value) for value in arguments}
        return {**(_type_schema(kind) if not others else {}), "enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_type_schema(argument) for argument in arguments]}
    if origin is list:
        return {"type": "array", "items": _type_schema(arguments[0])}
    if origin is dict and arguments[0] is str:
        return {"type": "object", "additionalProperties": _type_schema(arguments[1])}
    raise TypeError(f"{hint}: a tool's argument must be of a type of JSON")


def _read_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """Returns the text before the sections, and the meaning of each argument."""
    head, _, arguments = f"\n{docstring}".partition("\nArgs:\n")
    if not head and not arguments.startswith(" "):  # inspect.getdoc takes the indentation after a first line away
        arguments = textwrap.indent(arguments, " ")
    summary = re.split(r"\n(?:Returns|Raises|Yields|Examples?):\n", head)[0].strip()
    meanings: dict[str, str] = {}
    name, indent = "", 0
    for line in arguments.splitlines():
        if line.strip() and not line.startswith(" "):
            break  # the next section
        depth = len(line) - len(line.lstrip())
        entry = re.match(r"\s+(\w+)\s*(?:\([^)]*\))?:\s*(.*)", line)
        if entry and (not meanings or depth <= indent):
            name, indent = entry[1], depth
            meanings[name] = entry[2]
        elif name:
            meanings[name] = f"{meanings[name]} {line.strip()}".strip()
    return summary, meanings


class BadArgumentsError(Exception):
    """The policy called a tool wrongly. The text is its observation, and `outcome` is what metrics call it."""

    def __init__(self, text: str, outcome: str = "refused"):
        super().__init__(text)
        self.outcome = outcome


def cut_middle(text: str, max_chars: int) -> str:
    """Returns `text`; the first and last characters and a mark between them, if there are more than `max_chars`."""
    half = max_chars // 2
    return text if len(text) <= 2 * half else f"{text[:half]}\n[... cut ...]\n{text[len(text) - half :]}"


class Tool:
    """Answers calls, many at the same time."""

    schema: Schema
    version: str
    """Text that changes whenever the same call could get another result."""

    async def open(self) -> None:
        """Starts what the tool needs. Raises EpisodeError if it cannot start."""

    async def call(self, arguments: Mapping[str, str], limit_s: float) -> str:
        """Returns the result of a call, whose arguments fit the schema. Raises BadArgumentsError if there is none."""
        raise NotImplementedError

    async def close(self) -> None:
        pass
