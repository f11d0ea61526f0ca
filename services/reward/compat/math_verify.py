"""Keeps math-verify and sympy from evaluating text as Python.

Reason: both read numbers and plain arithmetic by `eval`, and here the text is a model's. Seen with math-verify 0.9.0,
latex2sympy2_extended 1.11.0, which it pins, and sympy 1.14.0.
"""

import ast
import logging
import re

import math_verify.parser

# sympy imports these lazily, and their import itself parses names; so they come before refuse_eval().
import sympy.calculus.util
import sympy.physics.units
import sympy.solvers
from sympy.parsing import sympy_parser

from services.common.compat.versions import require_version

require_version("math-verify")
require_version("sympy")

_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_OPERATORS = {
    ast.Add: lambda a, b: sympy.Add(a, b, evaluate=False),
    ast.Sub: lambda a, b: sympy.Add(a, sympy.Mul(-1, b, evaluate=False), evaluate=False),
    ast.Mult: lambda a, b: sympy.Mul(a, b, evaluate=False),
    ast.Div: lambda a, b: sympy.Mul(a, sympy.Pow(b, -1, evaluate=False), evaluate=False),
    ast.Pow: lambda a, b: sympy.Pow(a, b, evaluate=False),
}


def refuse_eval() -> None:
    """Replaces the only two ways in which math-verify and what it stands on evaluate text as Python.

    sympify() of a string imports parse_expr at each call, so this covers all of sympy; what sympy still compiles is its
    own polynomial code, written from variable counts.
    """
    sympy_parser.parse_expr = _parse_number
    math_verify.parser.parse_expr_cached = _parse_arithmetic
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own limits are off


def _parse_number(text: str, *_: object, **__: object) -> sympy.Number:
    """Stands in for sympy's parse_expr, which evals: latex2sympy reads every number with it, by sympy.Number(text)."""
    if not _NUMBER.fullmatch(text):
        raise sympy.SympifyError(text)
    return sympy.Float(text) if "." in text else sympy.Integer(int(text))


def _parse_arithmetic(text: str) -> sympy.Expr:
    """Stands in for math-verify's parse of plain arithmetic such as 3*(4+1)/2, which evals. Nothing is computed."""
    source = text.strip().rstrip(".").replace("×", "*").replace("÷", "/")
    return _to_sympy(ast.parse(source, mode="eval").body)


def _to_sympy(node: ast.expr) -> sympy.Expr:
    match node:
        case ast.Constant(value=int() | float() as value):
            return _parse_number(str(value))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return sympy.Mul(-1, _to_sympy(operand), evaluate=False)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
            return _OPERATORS[type(operator)](_to_sympy(left), _to_sympy(right))
    raise ValueError(f"not arithmetic: {ast.dump(node)[:100]}")
