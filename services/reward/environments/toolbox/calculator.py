"""Computes arithmetic by walking its syntax tree, with limits on everything."""

import ast
import math
import operator
from collections.abc import Callable, Mapping

from services.common.config.environment import CalculatorToolConfig
from services.reward.environments.tool_calls.schema import text_tool_schema
from services.reward.environments.toolbox.base import BadArgumentsError, Tool

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
    """Computes one expression."""

    version = "calculator-1"
    schema = text_tool_schema(
        "calculator", "Computes an arithmetic expression of numbers, parentheses and + - * / // % **.", "expression",
        "The expression, such as (3 + 4) * 2.",
    )  # fmt: skip

    def __init__(self, config: CalculatorToolConfig):
        pass

    async def call(self, arguments: Mapping[str, str], limit_s: float) -> str:
        """Returns the value as Python writes it."""
        return str(compute(arguments["expression"]))


def compute(expression: str) -> float:
    """Returns the value of an expression.

    Raises:
        BadArgumentsError: It is no arithmetic, exceeds a limit, or has no finite real value.
    """
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
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _limited(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _limited(_BINARY[type(node.op)](_value(node.left, depth - 1), _value(node.right, depth - 1)))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand, depth - 1))
    raise BadArgumentsError("only numbers, parentheses and + - * / // % ** are known")


def _power(base: float, exponent: float) -> float:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > _MAX_BITS:
        raise BadArgumentsError("the result is too large")
    return base**exponent


def _limited(value: object) -> float:
    if isinstance(value, complex):
        raise BadArgumentsError("the result is not a real number")
    if (isinstance(value, int) and value.bit_length() > _MAX_BITS) or not math.isfinite(_as_float(value)):
        raise BadArgumentsError("the result is too large")
    assert isinstance(value, int | float), "arithmetic of numbers gives numbers"
    return value


def _as_float(value: object) -> float:
    return value if isinstance(value, float) else 0.0
