"""Reads the asserts and scripts of a test, without running them."""

import ast
import builtins
import io
import re
import sys
import tokenize
from collections import Counter

from services.reward.inside.harness import encode

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
    """Returns the code with its integers of more than MAX_DIGITS digits in hexadecimal, which Python reads.

    Raises:
        SyntaxError: `code` is not Python code.
    """
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


def check_imports(*sources: str) -> None:
    """Checks that a test is Python code which imports only what the sandbox has: the standard library.

    An import within a `try` may fail.

    Raises:
        ImportError, SyntaxError, ValueError: It is not.
    """
    for source in sources:
        tree = ast.parse(source)
        guarded = {id(child) for node in ast.walk(tree) if isinstance(node, ast.Try) for child in ast.walk(node)}
        for node in (node for node in ast.walk(tree) if id(node) not in guarded):
            found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
            for name in found:
                if name.partition(".")[0] not in sys.stdlib_module_names:
                    raise ImportError(f"the test imports {name}, but the sandbox has only the standard library")


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


def used_names(code: str) -> tuple[list[str], list[str]]:
    """Returns the names of a script that could be the program's, and those of them that must be modules.

    A built-in name is never the program's. A name of a module of the standard library is that module if the script only
    takes attributes of it (`math.isclose`); otherwise it may be a function of the program.

    Raises:
        SyntaxError, TypeError, ValueError: `code` is not Python code.
    """
    nodes = list(ast.walk(ast.parse(code)))
    names = {node.id for node in nodes if isinstance(node, ast.Name)} - vars(builtins).keys()
    uses = Counter(node.id for node in nodes if isinstance(node, ast.Name))
    owners = [node.value for node in nodes if isinstance(node, ast.Attribute)]
    uses_as_owner = Counter(node.id for node in owners if isinstance(node, ast.Name))
    modules = [name for name in names & sys.stdlib_module_names if uses[name] == uses_as_owner[name]]
    return sorted(names), sorted(modules)
