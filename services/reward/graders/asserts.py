"""Reads the asserts and scripts of a test, without running them."""

import ast
import builtins
import sys
from collections import Counter

from services.reward.inside.harness import encode


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
                return ast.unparse(left), encode(ast.literal_eval(right))
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
