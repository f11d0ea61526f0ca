r"""Reads the tests of programs from dataset rows, and compares the results outside the sandbox.

A row's tests have one of these forms, as a JSON object or as the text of one:

    {"inputs": ["2 3\n", ...], "outputs": ["5\n", ...]}
        Tests a program that reads standard input and prints. Lines are compared word by word, ignoring whitespace at
        the ends of lines and of the text. Ending with an exception or a nonzero exit status fails the test.
    {"inputs": [[2, 3], ...], "outputs": [5, ...], "fn_name": "add"}
        Tests a function, or a method of a class Solution, with positional arguments. The result is compared as JSON: a
        tuple equals a list, and keys are text. APPS wraps each result in a list of one element: unwrap it. As in
        LiveCodeBench, an input may also be text with one JSON argument per line; its output is then JSON text.
    [{"input": "2 3\n", "output": "5\n"}, ...]
        The same of LiveCodeBench and DeepCoder, whose `metadata` may have the `func_name`.
    ["assert add(2, 3) == 5", ...]   or   {"asserts": [...], "setup": "import math"}
        Tests with assert statements, each of which is one test, as in MBPP. `setup` runs before the program.
    {"script": "def check(f): ...\ncheck(add)", "setup": "..."}
        Tests with any code that raises if the program is wrong, as in HumanEval. The code is one test. It runs as
        `python tests.py` would. TestCase classes are run too, and what pytest would call if the script does not name
        it: functions `test...` and methods `test...` of classes `Test...`. A script whose checks nothing calls, such
        as HumanEval's column `test` by itself, is refused: append `check(NAME)`.

Inputs, calls and asserts of the form `assert FUNCTION(LITERALS) == LITERAL` run in the sandbox without the expected
value, and their results are compared here. The expected values of other asserts and of scripts are part of code that
calls the program; that code and the program run in two processes, which exchange data over pipes
(../sandboxed/wire.py). docs/algorithms.md says what such a test gets of the program's objects, and docs/security.md
what a program can still do. Use inputs and outputs wherever a dataset has them.
"""

import ast
import functools
import io
import json
import math
import re
import tokenize
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain
from typing import Any

from services.reward.errors import FailureReason, ScoringError
from services.reward.graders.texts import after_reasoning, blocks
from services.reward.sandboxed.checker import PASSED
from services.reward.sandboxed.harness import encode
from services.reward.sandboxed.scripts import calls_anything, check_imports, used_names, with_calls
from services.reward.sandboxed.wire import pack

MAX_DIGITS = 4300
"""Most digits of an integer that Python reads and writes in decimal, unless a process asks for more."""
_LONG = re.compile(rf"[0-9][0-9_]{{{MAX_DIGITS},}}")


def to_int(digits: str) -> int:
    """Returns the integer that any number of decimal digits writes."""
    if len(digits) <= MAX_DIGITS:
        return int(digits)
    if digits[0] in "+-":
        return -to_int(digits[1:]) if digits[0] == "-" else to_int(digits[1:])
    low = len(digits) // 2
    return to_int(digits[:-low]) * 10**low + to_int(digits[-low:])


def with_short_literals(code: str) -> str:
    """Returns the code with its integers of more than MAX_DIGITS digits in hexadecimal, which Python reads."""
    if not _LONG.search(code):
        return code
    lines = io.StringIO(code).readlines()
    try:
        tokens = list(tokenize.generate_tokens(iter(lines).__next__))
    except tokenize.TokenError as error:
        raise SyntaxError(str(error)) from error
    for token in reversed(tokens):
        if token.type == tokenize.NUMBER and _LONG.fullmatch(token.string):
            (row, start), (_, end) = token.start, token.end
            line, number = lines[row - 1], to_int(token.string.replace("_", ""))
            lines[row - 1] = f"{line[:start]}{number:#x}{line[end:]}"
    return "".join(lines)


def split_assert(code: str) -> tuple[str, object] | None:
    """Splits `assert NAME(LITERALS) == LITERAL` into the call and the literal as harness.encode writes it.

    Returns None if `code` has another form. The left side must be only a call: in `(f(2) == 5) == True` or
    `isclose(f(2), 5.0) == True` the expected value is part of the expression that the program's process would compute.

    Raises:
        SyntaxError, TypeError, ValueError: `code` is not Python code.
    """
    match ast.parse(code).body:
        case [ast.Assert(test=ast.Compare(left=ast.Call() as left, ops=[ast.Eq()], comparators=[right]))]:
            if not isinstance(left.func, ast.Name):
                return None
            try:
                for argument in (*left.args, *(keyword.value for keyword in left.keywords)):
                    ast.literal_eval(argument)
                return ast.get_source_segment(code, left) or "", encode(ast.literal_eval(right))
            except (TypeError, ValueError):
                return None
    return None


_PYTHON = ("python", "python3", "py", "py3", "ipython", "ipython3")
_INTEGER = re.compile(r"[-+]?[0-9]+")
_NUMBER = re.compile(r"[-+]?(?:(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:e[-+]?[0-9]+)?|inf(?:inity)?|nan)", re.IGNORECASE)


@dataclass(frozen=True)
class Test:
    """One test: `request` enters the sandbox (see sandboxed/harness.py), and `accepts` judges what comes back.

    The sizes are those of the text that the program must read and print. If a limit is below them, the dataset or the
    config is wrong, not the program.
    """

    request: Mapping[str, object]
    accepts: Callable[[str], bool]
    input_bytes: int = 0
    output_bytes: int = 0


@dataclass(frozen=True)
class Tests:
    """At least one test; `setup` is code that runs before the program in each test."""

    setup: str
    tests: tuple[Test, ...]


_OPENED_IN_LINE = re.compile(rf"(?<=[^\s`])[ \t]*(`{{3,}}(?:{'|'.join(_PYTHON)})[ \t]*)$", re.MULTILINE | re.IGNORECASE)


def find_program(completion: str, *, require_fence: bool) -> str | None:
    """Returns the last fenced Python block after the reasoning, else the last fenced block without a language.

    If there is no Python block, the last Python fence at the end of a line of text opens one too. A completion without
    any fence is returned as a whole, or None with `require_fence`.
    """
    text = after_reasoning(completion)
    fenced = list(blocks(text))
    if not any(language in _PYTHON for language, _ in fenced):
        last = max(_OPENED_IN_LINE.finditer(text), key=re.Match.start, default=None)
        fenced += blocks(text[last.start(1) :]) if last else ()
    if not fenced:
        return None if require_fence else text
    tagged = [block for language, block in fenced if language in _PYTHON]
    untagged = [block for language, block in fenced if not language]
    return (tagged or untagged or [None])[-1]


def read_tests(tests: Any, *, float_tolerance: float) -> Tests:
    """Parses the tests of a dataset row. Raises ScoringError INVALID_ANSWER if they have none of the forms above."""
    try:
        tests = _from_text(tests) if isinstance(tests, str) else tests
        if isinstance(tests, list):
            tests = _from_cases(tests) if tests and isinstance(tests[0], dict) else {"asserts": tests}
        tests = {key: value for key, value in tests.items() if value is not None}  # a table has all keys in all rows
        setup = tests.get("setup", "")
        if not isinstance(setup, str):
            raise TypeError(f"setup must be text: {setup!r:.100}")
        for form, read in _FORMS.items():
            if tests.keys() - {"setup"} == set(form):
                parsed = tuple(read(**{key: tests[key] for key in form}, setup=setup, tolerance=float_tolerance))
                break
        else:
            raise ValueError(f"keys {sorted(tests)} match no known form of tests")
        if not parsed:
            raise ValueError("there must be at least one test")
        codes = [str(test.request["code"]) for test in parsed if "code" in test.request]
        check_imports(setup, *codes)
        if len(codes) == len(parsed) and not any(map(calls_anything, codes)):
            raise ValueError("the code has no check, so every program would pass: write an assert statement")
    except (ValueError, TypeError, AttributeError, ImportError, SyntaxError, RecursionError) as error:
        raise ScoringError(FailureReason.INVALID_ANSWER, f"tests: {type(error).__name__}: {error}"[:500]) from error
    return Tests(setup, parsed)


def _from_text(tests: str) -> Any:
    try:
        return json.loads(tests, parse_int=to_int)
    except json.JSONDecodeError as error:
        forms = 'code is {"script": CODE} or ["assert ...", ...]'
        raise ValueError(f"{tests!r:.80} is not JSON ({error}); {forms}") from error


def _from_cases(cases: list[dict]) -> dict:
    """Returns the tests that LiveCodeBench and DeepCoder have, an object for each, as inputs and outputs."""
    if not all({"input", "output"} <= case.keys() for case in cases):
        raise ValueError(f"each test must have input and output: {cases[0]!r:.100}")
    names = {(case.get("metadata") or {}).get("func_name") for case in cases}
    if len(names) > 1 or (names == {None} and any(case.get("testtype") == "functional" for case in cases)):
        raise ValueError('tests of a function must name it: write {"inputs": ..., "outputs": ..., "fn_name": NAME}')
    tests = {"inputs": [case["input"] for case in cases], "outputs": [case["output"] for case in cases]}
    return {**tests, "fn_name": names.pop()}


def _read_pairs(inputs: list, outputs: list, setup: str, tolerance: float) -> list[Test]:
    for text in (*inputs, *outputs):
        if not isinstance(text, str):
            raise TypeError(f"inputs and outputs must be text, or name a function by fn_name: {text!r:.100}")
    return [
        Test(
            {"kind": "stdin", "input": text},
            functools.partial(_same_text, expected, tolerance),
            input_bytes=len(text.encode()),
            output_bytes=len(expected.encode()),
        )
        for text, expected in zip(inputs, outputs, strict=True)
    ]


def _read_calls(inputs: list, outputs: list, fn_name: str, setup: str, tolerance: float) -> list[Test]:
    if not fn_name.isidentifier():
        raise ValueError(f"fn_name {fn_name!r} is not a name")
    tests = []
    for args, expected in zip(inputs, outputs, strict=True):
        if isinstance(args, str):
            args = [json.loads(line, parse_int=to_int) for line in args.strip().split("\n")] if args.strip() else []
            expected = json.loads(expected, parse_int=to_int)
        if not isinstance(args, list):
            raise TypeError(f"an input of {fn_name} must be a list of its arguments: {args!r:.100}")
        tests.append(
            _json_test({"kind": "call", "function": fn_name, "args": pack(args, _refuse)}, expected, tolerance)
        )
    return tests


def _read_assert(code: str, setup: str) -> Test:
    code = with_short_literals(code)
    parts = split_assert(code)
    if parts is None:
        return _script(code, setup)
    expression, expected = parts
    return _json_test({"kind": "value", "expression": expression}, expected, 0.0)


def _json_test(request: Mapping[str, object], expected: object, tolerance: float) -> Test:
    try:
        num_bytes = len(json.dumps(expected))
    except ValueError:  # Python writes no integer of more digits than it reads
        num_bytes = 0
    return Test(request, functools.partial(_same_json, expected, tolerance), output_bytes=num_bytes)


def _refuse(value: object) -> dict:
    raise TypeError(f"an argument must be JSON, not a {type(value).__name__}")


def _script(code: str, setup: str) -> Test:
    code = with_calls(with_short_literals(code), setup)
    names, modules = used_names(code)
    return Test({"kind": "script", "code": code, "names": names, "modules": modules}, PASSED.__eq__)


_FORMS: dict[tuple[str, ...], Callable[..., list[Test]]] = {
    ("inputs", "outputs"): _read_pairs,
    ("inputs", "outputs", "fn_name"): _read_calls,
    ("asserts",): lambda asserts, setup, tolerance: [_read_assert(code, setup) for code in asserts],
    ("script",): lambda script, setup, tolerance: [_script(script, setup)],
}


def _same_text(expected: str, tolerance: float, output: str) -> bool:
    wanted, got = ([line.split() for line in text.strip().splitlines()] for text in (expected, output))
    if list(map(len, wanted)) != list(map(len, got)):  # in the number of lines, or of words in one
        return False
    pairs = zip(chain.from_iterable(wanted), chain.from_iterable(got), strict=True)
    return all(_same_word(tolerance, *pair) for pair in pairs)


def _same_word(tolerance: float, expected: str, output: str) -> bool:
    if expected == output or _INTEGER.fullmatch(expected):
        return expected == output
    is_number = _NUMBER.fullmatch(expected) and _NUMBER.fullmatch(output)
    return bool(is_number) and _same_number(float(expected), float(output), tolerance)


def _same_number(expected: float, output: float, tolerance: float) -> bool:
    if math.isnan(expected):
        return math.isnan(output)
    return math.isclose(expected, output, rel_tol=tolerance, abs_tol=tolerance)


def _same_json(expected: object, tolerance: float, output: str) -> bool:
    try:
        return _same_value(expected, json.loads(output, parse_int=_to_number), tolerance)
    except (ValueError, OverflowError, RecursionError):
        return False


def _to_number(digits: str) -> int | Decimal:
    """Returns an integer of a program's result. A long one is a Decimal, which is made in linear time."""
    return int(digits) if len(digits) <= MAX_DIGITS else Decimal(digits)


def _same_value(expected: object, output: object, tolerance: float) -> bool:
    if isinstance(expected, list) and isinstance(output, list):
        pairs = zip(expected, output, strict=False)
        return len(expected) == len(output) and all(_same_value(*pair, tolerance) for pair in pairs)
    if isinstance(expected, dict) and isinstance(output, dict):
        pairs = ((expected[key], output.get(key)) for key in expected)
        return expected.keys() == output.keys() and all(_same_value(*pair, tolerance) for pair in pairs)
    if isinstance(expected, float) and isinstance(output, int | float | Decimal):
        return _same_number(expected, float(output), tolerance)
    return expected == output
