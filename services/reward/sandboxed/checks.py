"""Finds the checks in a test's code. Read only when an exception leaves a `with` or a callback, as `ast` is slow to
import."""

import ast
import functools


def is_check(code: str, line: int) -> bool:
    """Returns whether the line is part of a check: an assert statement of more than a constant, or a call of
    `assert...` or `fail...`."""
    return any(first <= line <= last for first, last in _checks(_parse(code)))


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
    return innermost is not None and any(last >= raised[0] for _, last in _checks(*innermost.body))


@functools.cache
def _parse(code: str) -> ast.Module:
    return ast.parse(code)


def _checks(*trees: ast.AST) -> list[tuple[int, int]]:
    """Returns the first and the last line of each check."""
    spans = []
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.Assert(test=test) if not isinstance(test, ast.Constant):
                spans.append((node.lineno, node.end_lineno or node.lineno))
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name.startswith(("assert", "fail")):
                spans.append((node.lineno, node.end_lineno or node.lineno))
    return spans
