"""Tests that math-verify and sympy evaluate text as Python only at the two places that are replaced."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import latex2sympy2_extended
import math_verify
import math_verify.parser
import pytest
import sympy
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse
from sympy.parsing import sympy_parser

from services.reward.compat import refuse_eval_of_math_verify

EVAL = re.compile(r"(?<![\w.])(?:eval|exec|compile)\(")


@pytest.fixture(autouse=True)
def as_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoes the patches of each test at its end, so that each test makes its own."""
    monkeypatch.setattr(sympy_parser, "parse_expr", sympy_parser.parse_expr)
    monkeypatch.setattr(math_verify.parser, "parse_expr_cached", math_verify.parser.parse_expr_cached)


def test_unpatched_they_run_what_they_read() -> None:
    program = (
        "import os, sympy, math_verify.parser as parser\n"
        "text = '__import__(\"os\").getpid()'\n"
        "assert sympy.sympify(text) == os.getpid()\n"
        "assert parser.parse_expr_cached(text) == os.getpid()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_patched_they_refuse_it() -> None:
    refuse_eval_of_math_verify()
    with pytest.raises(sympy.SympifyError):
        sympy.sympify('__import__("os").getpid()')
    with pytest.raises(ValueError, match="not arithmetic"):
        math_verify.parser.parse_expr_cached('__import__("os").getpid()')
    assert sympy.sympify("12.5") == sympy.Float("12.5")
    assert math_verify.parser.parse_expr_cached("3*(4+1)/2").doit() == sympy.Rational(15, 2)


def test_both_are_looked_up_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(sympy_parser, "parse_expr", lambda text, *_, **__: asked.append(text) or sympy.Integer(3))
    monkeypatch.setattr(math_verify.parser, "parse_expr_cached", lambda text: asked.append(text) or sympy.Integer(4))
    sympy.sympify("1 + x")
    parse(r"\boxed{7}", (LatexExtractionConfig(),), parsing_timeout=None)
    parse("it is 3*(4+1)/2", (ExprExtractionConfig(),), parsing_timeout=None)
    assert asked[0] == "1 + x" and "7" in asked and "3*(4+1)/2" in asked


def test_math_verify_and_its_grammar_evaluate_nothing_themselves() -> None:
    for package in (math_verify, latex2sympy2_extended):
        files = Path(package.__file__).parent.rglob("*.py")
        lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
        assert not [line for line in lines if EVAL.search(line) and "re.compile(" not in line]


def test_sympify_takes_the_parser_from_its_module_at_each_call() -> None:
    assert EVAL.search(inspect.getsource(sympy_parser.eval_expr))
    assert "import (parse_expr" in inspect.getsource(sympy.sympify)  # at each call
