"""Keeps reasoning-gym from evaluating answers as Python.

Reason: some tasks read an answer that is a list with `eval`, and others one that is a formula with sympy's parse_expr,
which uses `eval` too. Here a model wrote the answer. Seen with reasoning-gym 0.1.25 and sympy 1.14.0.
"""

import ast
import builtins
import importlib
import keyword
import re
import sys

import sympy
from sympy.parsing import sympy_parser

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


def refuse_eval() -> None:
    """Lets the tasks that were imported read only plain lists and formulas; all else raises ValueError."""
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
