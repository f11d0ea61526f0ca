r"""Tests of programs: the forms that a dataset row may have, and the comparisons that decide outside of the sandbox.

A row's tests are one of these, as a JSON object or as text that is one:

    {"inputs": ["2 3\n", ...], "outputs": ["5\n", ...]}
        A program that reads standard input and prints. Lines are compared word by word, blank space at the ends of
        lines and of the text does not count. An end by exception or with another exit status than 0 fails.
    {"inputs": [[2, 3], ...], "outputs": [5, ...], "fn_name": "add"}
        A function, or a method of a class Solution, and its positional arguments. The result is compared as JSON: a
        tuple is a list, keys are text. APPS wraps results in lists of one: unwrap them. An input may also be text with
        one argument in JSON on each line, and its output is JSON text then, as in LiveCodeBench.
    ["assert add(2, 3) == 5", ...]   or   {"asserts": [...], "setup": "import math"}
        Statements about the program, each a test, as in MBPP. `setup` runs before the program.
    {"script": "def check(f): ...\ncheck(add)", "setup": "..."}
        Any code that raises if the program is wrong, one test, as in HumanEval; TestCase classes in it are run too.

What decides: inputs, calls and asserts of the form `assert EXPRESSION == LITERAL` are run in the sandbox without the
expected value, and what comes back is compared here. So nothing that a program prints, exits with, patches or
overloads makes a wrong result right.

A limit: in every other assert and in a script, expected values are part of code that runs in one process with the
program. It passes only by a nonce that is out of reach of Python code there, and that no process of another test holds
(see harness.py), so that exits, output, files, frames, garbage collector and descriptors forge nothing; builtins,
imports and unittest are restored after the program is loaded; and == with plain data is that of plain data (see
asserts.py). But the tests' questions are put to the program's objects: one that overloads < or is always true passes
`assert f(x)`, two of its own classes are as equal as it says, a patched module of the standard library stays patched, a
program can read the test that it is in from its caller's frame, and native code can search the process's memory. Give
inputs and outputs wherever they exist.
"""

import functools
import json
import math
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.reward.graders.asserts import split_assert, with_strict_equality
from services.reward.scorers.base import FailureReason, ScoringError

_FENCE = re.compile(r"^[ \t]*```([^\n`]*)\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON = ("python", "python3", "py")
_INTEGER = re.compile(r"[-+]?[0-9]+")


@dataclass(frozen=True)
class Test:
    """`request` is what enters the sandbox (see harness.py); `accepts` judges the output that comes back.

    The sizes are those of text that is read or must be printed; a limit below them is no fault of a program.
    """

    request: dict[str, Any]
    accepts: Callable[[str], bool]
    input_bytes: int = 0
    output_bytes: int = 0


@dataclass(frozen=True)
class Tests:
    """At least one test; `setup` is code that runs before the program in each."""

    setup: str
    tests: tuple[Test, ...]


def find_program(completion: str, *, require_fence: bool) -> str | None:
    """The last fenced block of Python, else the last block without a language, else a text without any fence."""
    blocks = [(match[1].strip().lower(), match[2]) for match in _FENCE.finditer(completion)]
    if not blocks:
        return None if require_fence else completion
    tagged = [text for language, text in blocks if language in _PYTHON]
    untagged = [text for language, text in blocks if not language]
    return (tagged or untagged or [None])[-1]


def read_tests(tests: Any, *, float_tolerance: float) -> Tests:
    """The tests of a dataset row, in one of the forms above.

    Raises:
        ScoringError: INVALID_ANSWER, they are in none of them.
    """
    try:
        tests = json.loads(tests) if isinstance(tests, str) else tests
        if isinstance(tests, list):
            tests = {"asserts": tests}
        setup = tests.get("setup", "")
        for form, read in _FORMS.items():
            if tests.keys() - {"setup"} == set(form):
                found = tuple(read(**{key: tests[key] for key in form}, tolerance=float_tolerance))
                break
        else:
            raise ValueError(f"keys {sorted(tests)} are no form of tests")
        if not found or not isinstance(setup, str):
            raise ValueError("there must be at least one test, and setup must be text")
    except (ValueError, TypeError, AttributeError, SyntaxError, RecursionError) as error:
        raise ScoringError(FailureReason.INVALID_ANSWER, f"tests: {type(error).__name__}: {error}"[:500]) from error
    return Tests(setup, found)


def _read_pairs(inputs: list, outputs: list, tolerance: float) -> list[Test]:
    for text in (*inputs, *outputs):
        if not isinstance(text, str):
            raise TypeError(f"inputs and outputs must be text, or name a function by fn_name: {text!r:.100}")
    return [
        Test(
            {"kind": "stdin", "input": given},
            functools.partial(_same_text, expected, tolerance),
            input_bytes=len(given.encode()),
            output_bytes=len(expected.encode()),
        )
        for given, expected in zip(inputs, outputs, strict=True)
    ]


def _read_calls(inputs: list, outputs: list, fn_name: str, tolerance: float) -> list[Test]:
    if not fn_name.isidentifier():
        raise ValueError(f"fn_name {fn_name!r} is not a name")
    found = []
    for given, expected in zip(inputs, outputs, strict=True):
        args = given
        if isinstance(given, str):
            args, expected = [json.loads(line) for line in given.splitlines()], json.loads(expected)
        if not isinstance(args, list):
            raise TypeError(f"an input of {fn_name} must be a list of its arguments: {given!r:.100}")
        request = {"kind": "call", "function": fn_name, "args": args}
        found.append(Test(request, functools.partial(_same_json, expected, tolerance)))
    return found


def _read_asserts(asserts: list, tolerance: float) -> list[Test]:
    return [_read_assert(code) for code in asserts]


def _read_assert(code: str) -> Test:
    parts = split_assert(code)
    if parts is None:
        return _script(code)
    expression, expected = parts
    return Test({"kind": "value", "expression": expression}, functools.partial(_same_json, expected, 0.0))


def _script(code: str) -> Test:
    nonce = secrets.token_hex(32)
    request = {"kind": "script", "code": with_strict_equality(code), "nonce": nonce}
    return Test(request, functools.partial(str.__eq__, nonce))


_FORMS: dict[tuple[str, ...], Callable[..., list[Test]]] = {
    ("inputs", "outputs"): _read_pairs,
    ("inputs", "outputs", "fn_name"): _read_calls,
    ("asserts",): _read_asserts,
    ("script",): lambda script, tolerance: [_script(script)],
}


def _same_text(expected: str, tolerance: float, output: str) -> bool:
    wanted, got = expected.strip().splitlines(), output.strip().splitlines()
    return len(wanted) == len(got) and all(map(functools.partial(_same_line, tolerance), wanted, got))


def _same_line(tolerance: float, expected: str, output: str) -> bool:
    wanted, got = expected.split(), output.split()
    return len(wanted) == len(got) and all(map(functools.partial(_same_word, tolerance), wanted, got))


def _same_word(tolerance: float, expected: str, output: str) -> bool:
    if expected == output or _INTEGER.fullmatch(expected):
        return expected == output
    try:
        return _same_number(float(expected), float(output), tolerance)
    except ValueError:
        return False


def _same_number(expected: float, output: float, tolerance: float) -> bool:
    return math.isclose(expected, output, rel_tol=tolerance, abs_tol=tolerance)


def _same_json(expected: Any, tolerance: float, output: str) -> bool:
    try:
        return _same_value(expected, json.loads(output), tolerance)
    except (ValueError, OverflowError, RecursionError):
        return False


def _same_value(expected: Any, output: Any, tolerance: float) -> bool:
    if isinstance(expected, list) and isinstance(output, list):
        pairs = zip(expected, output, strict=False)
        return len(expected) == len(output) and all(_same_value(*pair, tolerance) for pair in pairs)
    if isinstance(expected, dict) and isinstance(output, dict):
        pairs = ((expected[key], output.get(key)) for key in expected)
        return expected.keys() == output.keys() and all(_same_value(*pair, tolerance) for pair in pairs)
    if isinstance(expected, float) and isinstance(output, int | float):
        return _same_number(expected, output, tolerance)
    return expected == output
