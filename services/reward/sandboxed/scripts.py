"""Reads the code of a script: what it imports, the names that the program must have, and where its checks are.

The grader reads it before the script runs, and the sandbox only when an exception leaves a `with` or a callback, as
`ast` is slow to import.

A script runs as `python tests.py` does. Of a file that is meant for pytest, this would only define the tests, and every
program would pass. So the calls that pytest makes are added, and a script whose checks would not run is refused.
"""

import ast
import builtins
import functools
import sys
from collections import Counter
from collections.abc import Iterator

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_CHECKS = ("assert", "fail", "exit", "quit")
_DYNAMIC = {"globals", "locals", "vars", "dir", "exec", "eval", "getattr", "modules", "__dict__", "methodcaller"}
"""Names with which code can call functions that it does not name."""
_HOOKS = {f"{when}_{what}" for when in ("setup", "teardown") for what in ("module", "function", "class", "method")}


def check_imports(*sources: str) -> None:
    """Raises ImportError if a test imports more than the standard library, except within a `try`."""
    for source in sources:
        tree = ast.parse(source)
        guarded = {id(child) for node in ast.walk(tree) if isinstance(node, ast.Try) for child in ast.walk(node)}
        for node in (node for node in ast.walk(tree) if id(node) not in guarded):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                if name.partition(".")[0] not in sys.stdlib_module_names:
                    raise ImportError(f"the test imports {name}, but the sandbox has only the standard library")


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


def with_calls(code: str, setup: str) -> str:
    """Returns the script with the calls that pytest would make of its functions and classes, if it does not name them.

    Raises:
        SyntaxError, TypeError, ValueError: `code` or `setup` is not Python code, or the script has checks that would
            not run. The message says what to write.
    """
    tree, before = ast.parse(code), ast.parse(setup)
    names = _names(_running(before, tree))
    calls = [call for node in tree.body for call in _calls(node, names)]
    whole = "\n".join([code, *calls])
    running = _running(before, ast.parse(whole))
    if any(map(_is_check, running)) or names & _DYNAMIC:
        return whole
    if any(map(_is_check, ast.walk(tree))):
        functions = [node.name for node in ast.walk(tree) if isinstance(node, _Function)]
        raise ValueError(
            f"the checks of the script never run, as nothing calls {' or '.join(functions)}: "
            f"append a call such as {functions[0]}(FUNCTION_OF_THE_PROGRAM)"
        )
    for node in running:
        match node:
            case ast.Expr(value=ast.Compare() | ast.UnaryOp(op=ast.Not())):
                raise ValueError(f"nothing checks `{ast.unparse(node)}`: write assert before it")
    return whole


def calls_anything(code: str) -> bool:
    """Returns whether the script has a check or at least a call, which could fail."""
    return any(isinstance(node, ast.Assert | ast.Raise | ast.Call) for node in _running(ast.parse(code)))


def _running(*trees: ast.Module) -> list[ast.AST]:
    """Returns the parts of the code that run: those outside functions, and those of functions that others name."""
    running: list[ast.AST] = []
    waiting: list[ast.AST] = [node for tree in trees for node in tree.body]
    names: set[str] = set()
    idle: list[ast.AST] = []
    while waiting:
        node = waiting.pop()
        names |= _names([node])
        is_definition = isinstance(node, ast.ClassDef | _Function)
        if is_definition and not (node.name in names or node.decorator_list or getattr(node, "bases", ())):
            idle.append(node)
        else:
            running.append(node)
            waiting += ast.iter_child_nodes(node)
            if isinstance(node, ast.ClassDef):  # its methods are called by operators too
                names |= {method.name for method in node.body if isinstance(method, _Function)}
        if not waiting:
            waiting = [one for one in idle if one.name in names]  # pyright: ignore[reportAttributeAccessIssue]
            idle = [one for one in idle if one.name not in names]  # pyright: ignore[reportAttributeAccessIssue]
    return running


def _names(nodes: list[ast.AST]) -> set[str]:
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def _is_check(node: ast.AST) -> bool:
    match node:
        case ast.Assert() | ast.Raise():
            return True
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name.startswith(_CHECKS)
    return False


def _calls(node: ast.stmt, names: set[str]) -> Iterator[str]:
    """Yields the calls that pytest would make of a function or class of the script.

    Raises:
        ValueError: Only pytest itself can make them.
    """
    if not isinstance(node, ast.ClassDef | _Function) or node.name in names:
        return
    if isinstance(node, _Function):
        if node.name in _HOOKS or (node.name.startswith("test") and not _is_helper(node)):
            _refuse_needs(node, num_given=0)
            yield f"{node.name}()"
    elif node.name.startswith("Test") and not node.bases:
        methods = [method for method in node.body if isinstance(method, _Function)]
        if any(method.name == "__init__" for method in methods):
            return  # pytest leaves it out too
        for method in methods:
            if method.name in _HOOKS or method.name.startswith("test"):
                _refuse_needs(method, num_given=1)
                yield f"{node.name}().{method.name}()"


def _is_helper(function: _Function) -> bool:
    return bool(function.args.args) and not any(map(_is_check, ast.walk(function)))


def _refuse_needs(test: _Function, *, num_given: int) -> None:
    """Raises ValueError if a call without arguments would not run the test."""
    needed = test.args.posonlyargs + test.args.args
    needed = needed[num_given : len(needed) - len(test.args.defaults)]
    if isinstance(test, ast.AsyncFunctionDef) or test.name in _HOOKS:
        raise ValueError(f"nothing runs {test.name}, as the sandbox has no pytest: call it, and the tests, yourself")
    if needed and not test.decorator_list:  # which may give arguments
        wanted = ", ".join(argument.arg for argument in needed)
        raise ValueError(f"nothing calls {test.name}: append {test.name}(...) with its {wanted} to the script")


def is_in_check(code: str, line: int) -> bool:
    """Returns whether the line is part of a check: an assert statement of more than a constant, or a call of
    `assert...` or `fail...`."""
    return any(first <= line <= last for first, last in _lines_of_checks(_parse(code)))


def skips_check(code: str, with_line: int, raised: list[int]) -> bool:
    """Returns whether the `with` at `with_line` has a check at or after the line in it that raised."""
    around = [
        node
        for node in ast.walk(_parse(code))
        if isinstance(node, ast.With)
        and node.lineno <= with_line <= node.body[0].lineno
        and any(node.body[0].lineno <= line <= (node.end_lineno or 0) for line in raised)
    ]
    innermost = max(around, key=lambda node: node.lineno, default=None)
    return innermost is not None and any(last >= raised[0] for _, last in _lines_of_checks(*innermost.body))


@functools.cache
def _parse(code: str) -> ast.Module:
    return ast.parse(code)


def _lines_of_checks(*trees: ast.AST) -> list[tuple[int, int]]:
    """Returns the first and the last line of each check."""
    spans = []
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.Assert(test=test) if not isinstance(test, ast.Constant):
                spans.append((node.lineno, node.end_lineno or node.lineno))
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name.startswith(("assert", "fail")):
                spans.append((node.lineno, node.end_lineno or node.lineno))
    return spans
