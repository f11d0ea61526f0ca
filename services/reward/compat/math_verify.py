"""Keeps math-verify and sympy from evaluating text as Python.

Reason: both parse numbers and plain arithmetic with `eval`, and here a model wrote the text. Seen with math-verify
0.9.0, latex2sympy2_extended 1.11.0, which it pins, and sympy 1.14.0.
"""

import ast
import logging
import re

import math_verify.parser

# sympy imports these lazily. Importing them parses names, so it must happen before refuse_eval().
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
    """Replaces the only two functions with which math-verify and its dependencies evaluate text as Python.

    sympify() of a string imports parse_expr at each call, so this covers all of sympy. sympy still compiles polynomial
    code, but generates it itself from the number of variables.
    """
    sympy_parser.parse_expr = _parse_number
    math_verify.parser.parse_expr_cached = _parse_arithmetic
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off


def _parse_number(text: str, *_: object, **__: object) -> sympy.Number:
    """Replaces sympy's parse_expr, which uses eval. latex2sympy parses every number with it, by sympy.Number(text)."""
    if not _NUMBER.fullmatch(text):
        raise sympy.SympifyError(text)
    return sympy.Float(text) if "." in text else sympy.Integer(int(text))


def _parse_arithmetic(text: str) -> sympy.Expr:
    """Replaces math-verify's parser of arithmetic such as 3*(4+1)/2, which uses eval. Does not compute the result."""
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
