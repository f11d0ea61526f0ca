"""The reward service's uses of the internals of its libraries; see services.common.compat.

math-verify, sympy and reasoning-gym evaluate some texts as Python, and here a model wrote the texts. A process has only
the libraries of what it runs: math-verify where it grades, reasoning-gym where it plays tasks.
"""

import ast
import builtins
import importlib
import keyword
import logging
import re
import sys

import sympy
from sympy.parsing import sympy_parser

from services.common.compat import require_version

_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_OPERATORS = {
    ast.Add: lambda a, b: sympy.Add(a, b, evaluate=False),
    ast.Sub: lambda a, b: sympy.Add(a, sympy.Mul(-1, b, evaluate=False), evaluate=False),
    ast.Mult: lambda a, b: sympy.Mul(a, b, evaluate=False),
    ast.Div: lambda a, b: sympy.Mul(a, sympy.Pow(b, -1, evaluate=False), evaluate=False),
    ast.Pow: lambda a, b: sympy.Pow(a, b, evaluate=False),
}


def refuse_eval_of_math_verify() -> None:
    """Replaces the only two functions with which math-verify and its dependencies evaluate text as Python.

    sympify() of a string imports parse_expr at each call, so this covers all of sympy. sympy still compiles polynomial
    code, but generates it itself from the number of variables.

    Reason: both parse numbers and plain arithmetic with `eval`. Seen with math-verify 0.9.0, latex2sympy2_extended
    1.11.0, which it pins, and sympy 1.14.0.
    """
    require_version("math-verify")
    require_version("sympy")
    import math_verify.parser

    # sympy imports these lazily. Importing them parses names, so it must happen before the functions are replaced.
    for name in ("calculus.util", "physics.units", "solvers"):
        importlib.import_module(f"sympy.{name}")
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


_READ_LISTS = ("algorithmic.binary_matrix", "algorithmic.spiral_matrix", "algorithmic.string_insertion")
_READ_LISTS += ("games.n_queens",)
_WORD = re.compile(r"[A-Za-z]\w*")
_NO_FUNCTION_CLASS = ("sqrt", "cbrt", "root", "Rational", "Integral")
_NO_FORMULA = re.compile(r"[^\w\s+*/^!.,()=-]|_|\.\s*[A-Za-z]|\)\s*\(", re.ASCII)
# Of which sympy would compute every digit. Others are left to the time limit of the worker.
_HUGE = re.compile(
    r"(?:\*\*|\^)[\s(+-]*[0-9]*(?:[0-9]{4}|[0-9]\s*(?:\*\*|\^|!))|[0-9]{4}[\s)]*!|factorial\(\s*[0-9]{4}"
)
_parse_expr = sympy_parser.parse_expr


def refuse_eval_of_reasoning_gym() -> None:
    """Lets the tasks that were imported read only plain lists and formulas; all else raises ValueError.

    Reason: some tasks read an answer that is a list with `eval`, and others one that is a formula with sympy's
    parse_expr, which uses `eval` too. Seen with reasoning-gym 0.1.25 and sympy 1.14.0.
    """
    sympy.parse_expr = _parse_formula  # sympy itself uses that of its module
    for name, module in list(sys.modules.items()):
        if name.startswith("reasoning_gym.") and vars(module).get("parse_expr") is _parse_expr:
            vars(module)["parse_expr"] = _parse_formula
    for name in _READ_LISTS:
        vars(importlib.import_module(f"reasoning_gym.{name}"))["eval"] = ast.literal_eval


def _parse_formula(text: str, local_dict: dict[str, object] | None = None) -> sympy.Basic:
    """Parses numbers, variables, constants and functions of sympy: nothing that names other objects, or is huge."""
    words = _WORD.findall(text)
    if _NO_FORMULA.search(text) or _HUGE.search(text) or not all(map(_is_known, words)):
        raise ValueError(f"not a formula: {text[:100]!r}")
    return _parse_expr(text, local_dict=local_dict)


def _is_known(word: str) -> bool:
    if (value := getattr(sympy, word, None)) is None:  # the parser makes a symbol of all but Python's own words
        return word == "abs" or not (keyword.iskeyword(word) or hasattr(builtins, word))
    is_function = word in _NO_FUNCTION_CLASS or isinstance(value, sympy.FunctionClass | sympy.NumberSymbol)
    return is_function or len(word) == 1
