"""Statements about a program, taken apart or rewritten so that its objects decide as little as possible."""

import ast
import inspect
from typing import Any

from services.reward.harness import encode

_EQUAL = f"""
def __equal__(left, right):
    import decimal, fractions, json
    {inspect.getsource(encode).replace(chr(10), chr(10) + "    ")}
    def plain(value):
        try:
            return (encode(value),)
        except TypeError:
            return None
    sides = plain(left), plain(right)
    if None not in sides:
        return sides[0] == sides[1]
    numbers = (decimal.Decimal, fractions.Fraction)
    return (sides == (None, None) or type(left) in numbers or type(right) in numbers) and left == right
"""


def split_assert(code: str) -> tuple[str, Any] | None:
    """Of `assert EXPRESSION == LITERAL`: the expression, and the literal as harness.encode writes it; else None.

    Raises:
        SyntaxError, TypeError, ValueError: `code` is not the text of Python code.
    """
    match ast.parse(code).body:
        case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]))]:
            try:
                return ast.unparse(left), encode(ast.literal_eval(right))
            except (TypeError, ValueError):
                return None
    return None


def with_strict_equality(code: str) -> str:
    """`code` with every == and != (and assertEqual) made a call that ignores what a program's class says of equality.

    Plain data equals plain data alone, and Decimal and Fraction what they equal; only two objects that are both
    something else are asked. Chains such as a == b == c are left as they are.

    Raises:
        SyntaxError, TypeError, ValueError: `code` is not the text of Python code.
    """
    tree = ast.parse(code)
    future = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    tree.body = [*future, *ast.parse(_EQUAL).body, *(node for node in tree.body if node not in future)]
    return ast.unparse(ast.fix_missing_locations(_StrictEquality().visit(tree)))


class _StrictEquality(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node if node.name == "__equal__" else self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        match node.ops:
            case [ast.Eq()]:
                return _equal(node.left, node.comparators[0])
            case [ast.NotEq()]:
                return ast.UnaryOp(ast.Not(), _equal(node.left, node.comparators[0]))
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Attribute(value=case, attr="assertEqual"), args=[left, right, *_]):
                return ast.Call(ast.Attribute(case, "assertTrue", ast.Load()), [_equal(left, right)], [])
        return node


def _equal(left: ast.expr, right: ast.expr) -> ast.Call:
    return ast.Call(ast.Name("__equal__", ast.Load()), [left, right], [])
