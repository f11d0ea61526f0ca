"""Tools that compute: programs in the sandbox, and arithmetic as a syntax tree with limits on everything."""

import ast
import asyncio
import json
import math
import operator
import platform
from collections.abc import Callable, Mapping
from pathlib import Path

from services.common.config.environment import CalculatorToolConfig, PythonToolConfig
from services.reward.environments.base import BadArgumentsError, Tool, off_the_clock, text_tool_schema
from services.reward.errors import EnvironmentFailure, EpisodeError, ScoringError
from services.reward.sandbox import Limits, Sandbox

_SUPERVISOR = Path(__file__).with_name("supervise.py").read_text()
_START_S = 5.0  # for the start of two interpreters, in addition to the program's time
_MARK_CHARS = 200  # more than supervise.py adds to the output


class Python(Tool):
    """Returns a program's output, including errors. Each program has a sandbox of its own."""

    version = f"python-2-{platform.python_version()}"
    schema = text_tool_schema("python", "Runs a Python program and returns what it prints.", "code", "The program.")

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
            with off_the_clock():
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
    schema = text_tool_schema(
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
