"""Makes JSON schemas of functions and checks arguments against them. Imports nothing heavy."""

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

Schema = Mapping[str, Any]
_TYPES: Mapping[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object"}
_CLASSES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "object": (dict,),
    "array": (list,), "null": (type(None),),
}  # fmt: skip


def tool_schema(name: str, description: str, parameters: Schema) -> Schema:
    """Returns a tool's schema as chat templates take it."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def text_tool_schema(name: str, description: str, argument: str, meaning: str) -> Schema:
    """Returns the schema of a tool with one argument, a text."""
    properties = {argument: {"type": "string", "description": meaning}}
    return tool_schema(name, description, {"type": "object", "properties": properties, "required": [argument]})


def function_schema(function: Callable[..., Any]) -> Schema:
    """Returns the schema of a function, from its signature and docstring (Google style).

    Raises:
        TypeError: It takes arguments that have no name, or of a type that JSON cannot hold.
    """
    hints = typing.get_type_hints(function)
    summary, meanings = _read_docstring(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    required = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{parameter} of {function.__name__}: a tool's arguments must be given by name")
        schema = _type_schema(hints.get(parameter.name, Any))
        meaning = meanings.get(parameter.name)
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
        if not _fits(value, properties[name]):
            return f"argument {name} must be {_describe(properties[name])}"
    return ""


def _fits(value: object, schema: Schema) -> bool:
    if "anyOf" in schema:
        return any(_fits(value, option) for option in schema["anyOf"])
    if "enum" in schema:
        return any(value == option and type(value) is type(option) for option in schema["enum"])
    kind = schema.get("type")
    if kind is None:
        return True
    if (isinstance(value, bool) and kind != "boolean") or not isinstance(value, _CLASSES[kind]):
        return False
    if isinstance(value, list):
        return all(_fits(entry, schema.get("items", {})) for entry in value)
    if isinstance(value, dict) and "additionalProperties" in schema:
        return all(_fits(entry, schema["additionalProperties"]) for entry in value.values())
    return True


def _describe(schema: Schema) -> str:
    if "anyOf" in schema:
        return " or ".join(map(_describe, schema["anyOf"]))
    if "enum" in schema:
        return "one of " + ", ".join(map(str, schema["enum"]))
    items = f" of {_describe(schema['items'])}" if schema.get("items") else ""
    return schema["type"] + items


def _type_schema(hint: Any) -> dict[str, Any]:
    if hint is Any:
        return {}
    if hint is type(None):
        return {"type": "null"}
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    if hint is list:
        return {"type": "array"}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _type_schema(arguments[0])
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_type_schema(argument) for argument in arguments]}
    if origin is list:
        return {"type": "array", "items": _type_schema(arguments[0])}
    if origin is dict and arguments[0] is str:
        return {"type": "object", "additionalProperties": _type_schema(arguments[1])}
    raise TypeError(f"{hint}: a tool's argument must be of a type of JSON")


def _read_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """Returns the text before the sections, and the meaning of each argument."""
    head, _, arguments = docstring.partition("\nArgs:\n")
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
