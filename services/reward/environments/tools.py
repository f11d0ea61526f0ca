"""Lets the policy call tools: the user's functions, those of MCP servers, search, programs and arithmetic.

Programs run in the sandbox. Arithmetic is computed from its syntax tree, with limits on everything.
"""

import ast
import asyncio
import json
import math
import operator
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from services.common.config.environment import CalculatorToolConfig, PythonToolConfig, ToolsEnvironmentConfig
from services.common.tool_syntax import BadCall, Call, Schema, ToolCall, find_calls, fits, is_option, read_texts
from services.reward.environments import base
from services.reward.environments.base import BadArgumentsError, Environment, Message, Reply, Tool, Turn
from services.reward.environments.functions import FunctionTools
from services.reward.environments.mcp import McpTools
from services.reward.environments.search import Search
from services.reward.errors import EnvironmentFailure, EpisodeError, ScoringError
from services.reward.sandbox import Limits, Sandbox

# Longer results are cut, so that those of a turn fit into one message of the service.
_MAX_RESULT_CHARS = 1 << 20


class ToolsEnvironment(Environment):
    """Calls the tools of a turn at the same time and returns the results in order. A turn without calls is the last."""

    def __init__(self, config: ToolsEnvironmentConfig):
        self._config = config
        self.roles = () if config.result_tag else ("tool",)
        self._arguments: dict[str, str] = {}
        self._parameters: dict[str, Schema] = {}
        self._tools = {tool.kind: TOOLS[tool.kind](tool) for tool in config.tools if tool.kind in TOOLS}
        self._servers = [McpTools(tool) for tool in config.tools if tool.kind == "mcp"]
        self._served: dict[str, McpTools] = {}
        self._functions = FunctionTools(config)
        self._has_functions = bool(self._functions.paths)

    async def open(self) -> None:
        for tool in self._tools.values():
            await tool.open()
        schemas, versions = [tool.schema for tool in self._tools.values()], list[str]()
        if self._has_functions:
            workers = self._functions.workers
            await workers.open()
            schemas += workers.facts["schemas"]
            versions.append(f"functions-{workers.version}")
        for server in self._servers:
            await server.open()
            self._served |= {schema["function"]["name"]: server for schema in server.schemas}
        self._set_tools(schemas + [schema for server in self._servers for schema in server.schemas])
        self.version = "1/" + ",".join([*(one.version for one in (*self._tools.values(), *self._servers)), *versions])

    def _set_tools(self, schemas: Sequence[Schema]) -> None:
        """Sets the tools that the policy can call. With syntax tags, the prompt must describe them."""
        names = [schema["function"]["name"] for schema in schemas]
        if len(set(names)) < len(names):
            raise _cannot(f"two tools have the same name: {', '.join(names)}")
        self._parameters = {schema["function"]["name"]: schema["function"]["parameters"] for schema in schemas}
        if self._config.syntax != "tags":
            self.tools = tuple(schemas)
            return
        for name, schema in zip(names, schemas, strict=True):
            argument = only_text_argument(schema)
            if argument is None:
                raise _cannot(f"tool {name} needs one argument, a text, to be called with syntax tags")
            if f"<{name}>" in self._config.reasoning_tags:
                raise _cannot(f"tool {name}: its tag is one of environment.reasoning_tags, so it would never be called")
            self._arguments[name] = argument

    def isolate(self, episode_id: str) -> None:
        self._functions.workers.isolate(episode_id)

    def fault(self, episode_id: str) -> EpisodeError | None:
        return self._functions.workers.fault(episode_id)

    async def reset(self, episode_id: str, seed: int, row: Mapping[str, object]) -> Sequence[Message]:
        if self._has_functions:
            await self._functions.begin(episode_id)
        return ()

    async def step(self, episode_id: str, turn: Turn) -> Reply:
        tags, syntax = self._config.reasoning_tags, self._config.syntax
        calls = find_calls(syntax, turn.text, self._arguments, tags, is_reasoning=turn.is_reasoning)
        if syntax == "qwen3_coder":
            calls = [self._typed(call) if isinstance(call, ToolCall) else call for call in calls]
        calling = [asyncio.create_task(self._answer(episode_id, call, 1 / len(calls))) for call in calls]
        try:
            answers = await asyncio.gather(*calling)
        finally:
            for call in calling:
                call.cancel()
            await asyncio.gather(*calling, return_exceptions=True)
        made = [call for call in calls if isinstance(call, ToolCall)]
        messages, outcomes = [message for message, _ in answers], [outcome for _, outcome in answers]
        return Reply(messages, done=not calls, tool_calls=made, outcomes=outcomes)

    def _typed(self, call: ToolCall) -> ToolCall:
        """Returns the call with its texts read as its schema says; as it is if there is no such tool."""
        parameters = self._parameters.get(call.name)
        return ToolCall(call.name, read_texts(call.arguments, parameters)) if parameters else call

    async def _answer(self, episode_id: str, call: Call, share: float) -> tuple[Message, str]:
        if isinstance(call, BadCall):
            return self._message(call.name, f"error: {call.detail}"), "malformed"
        try:
            return self._message(call.name, await self._call(episode_id, call, share)), "ok"
        except BadArgumentsError as error:
            return self._message(call.name, f"error: {error}"), error.outcome

    def _message(self, name: str, text: str) -> Message:
        # JSON of the policy, or a page that a tool has found, may hold half of a surrogate pair.
        text = base.cut_middle(text, _MAX_RESULT_CHARS)
        name, text = (part.encode(errors="replace").decode() for part in (name, text))
        if tag := self._config.result_tag:
            return Message("", f"\n\n<{tag}>{text}</{tag}>\n\n")
        return Message("tool", text, name)

    async def _call(self, episode_id: str, call: ToolCall, share: float) -> str:
        """Calls a tool. It may take its share of `turn_s`, so that all calls of a turn fit into it."""
        parameters = self._parameters.get(call.name)
        if parameters is None:
            raise BadArgumentsError(f"there is no tool {call.name[:100]!r}: there are {', '.join(self._parameters)}")
        if server := self._served.get(call.name):
            return await server.call(call)
        if fault := find_fault(call.arguments, parameters):
            raise BadArgumentsError(fault)
        arguments = fitted(call.arguments, parameters)
        tool = self._tools.get(call.name)
        if tool is None:
            return await self._functions.call(episode_id, ToolCall(call.name, arguments))
        limit_s = share * self._config.turn_s
        return await tool.call({name: str(value) for name, value in arguments.items()}, limit_s)

    async def end(self, episode_id: str) -> None:
        if self._has_functions:
            await self._functions.workers.end(episode_id)

    async def close(self) -> None:
        await self._functions.workers.close()
        await asyncio.gather(*(server.close() for server in self._servers))
        for tool in self._tools.values():
            await tool.close()


def _cannot(detail: str) -> EpisodeError:
    return EpisodeError(EnvironmentFailure.REFUSED, detail)


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


_SUPERVISOR = Path(__file__).with_name("supervise.py").read_text()
_START_S = 5.0  # for the start of two interpreters, in addition to the program's time
_MARK_CHARS = 200  # more than supervise.py adds to the output


class Python(Tool):
    """Returns a program's output, including errors. Each program has a sandbox of its own."""

    version = f"python-2-{platform.python_version()}"
    schema = base.text_tool_schema(
        "python", "Runs a Python program and returns what it prints.", "code", "The program."
    )

    def __init__(self, config: PythonToolConfig):
        self._config = config
        self._slots = asyncio.Semaphore(config.max_concurrent)
        self._sandbox = Sandbox(
            Limits(
                timeout_s=config.timeout_s + _START_S,
                memory_bytes=1 << 30,
                disk_bytes=64 << 20,
                max_processes=16,
                max_output_bytes=4 * (config.max_output_chars + _MARK_CHARS),  # a character of UTF-8 has up to 4 bytes
            )
        )

    async def open(self) -> None:
        try:
            await self._sandbox.open()
        except ScoringError as error:
            raise EpisodeError(EnvironmentFailure.CRASHED, error.detail) from error

    async def call(self, arguments: Mapping[str, str], limit_s: float) -> str:
        """Runs the program within both time limits; the policy is told if it takes longer.

        Nothing of this counts toward `turn_s`: waiting is not the program's fault, and the program has its own limit.
        """
        job = {"program": arguments["code"], "timeout_s": min(self._config.timeout_s, limit_s)}
        test = {"kind": "stdin", "input": json.dumps({**job, "max_chars": self._config.max_output_chars})}
        try:
            with base.off_the_clock():
                async with self._slots, self._sandbox.run(_SUPERVISOR, [test]) as outputs:
                    (output,) = [output async for output in outputs]
        except ScoringError as error:
            raise EpisodeError(EnvironmentFailure.CRASHED, error.detail) from error
        return "error: the program was stopped: it exceeded a limit" if output is None else output

    async def close(self) -> None:
        self._sandbox.close()


_MAX_CHARS, _MAX_DEPTH, _MAX_BITS = 1000, 50, 4096
_BINARY: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: lambda base, exponent: _power(base, exponent),
}
_UNARY: Mapping[type[ast.unaryop], Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class Calculator(Tool):
    version = "calculator-1"
    schema = base.text_tool_schema(
        "calculator", "Computes an arithmetic expression of numbers, parentheses and + - * / // % **.", "expression",
        "The expression, such as (3 + 4) * 2.",
    )  # fmt: skip

    def __init__(self, config: CalculatorToolConfig):
        pass

    async def call(self, arguments: Mapping[str, str], limit_s: float) -> str:
        return str(compute(arguments["expression"]))


def compute(expression: str) -> float:
    """Raises BadArgumentsError if `expression` is no arithmetic, exceeds a limit, or has no finite real value."""
    if len(expression) > _MAX_CHARS:
        raise BadArgumentsError(f"the expression has more than {_MAX_CHARS} characters")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body, _MAX_DEPTH)
    except ArithmeticError as error:
        raise BadArgumentsError(str(error)) from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadArgumentsError("this is not an arithmetic expression") from error


def _value(node: ast.expr, depth: int) -> float:
    if depth == 0:
        raise BadArgumentsError(f"the expression is nested more than {_MAX_DEPTH} deep")
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return _checked(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _checked(_BINARY[type(node.op)](_value(node.left, depth - 1), _value(node.right, depth - 1)))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand, depth - 1))
    raise BadArgumentsError("only numbers, parentheses and + - * / // % ** are known")


def _power(base: float, exponent: float) -> float:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > _MAX_BITS:
        raise BadArgumentsError("the result is too large")
    return base**exponent


def _checked(value: float | complex) -> float:
    if isinstance(value, complex):  # as (-8) ** 0.5 is
        raise BadArgumentsError("the result is not a real number")
    if value.bit_length() > _MAX_BITS if isinstance(value, int) else not math.isfinite(value):
        raise BadArgumentsError("the result is too large")
    return value


TOOLS: Mapping[str, Callable[..., Tool]] = {"python": Python, "search": Search, "calculator": Calculator}
"""Maps the kinds of tools that are one tool to their classes. `function` and `mcp` are not among them."""
