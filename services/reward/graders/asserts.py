"""Splits or rewrites the asserts of a test, so that the tested program's objects decide as little as possible."""

import ast
import inspect

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


def split_assert(code: str) -> tuple[str, object] | None:
    """Splits `assert EXPRESSION == LITERAL` into the expression and the literal as harness.encode writes it.

    Returns None if `code` has another form.

    Raises:
        SyntaxError, TypeError, ValueError: `code` is not Python code.
    """
    match ast.parse(code).body:
        case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]))]:
            try:
                return ast.unparse(left), encode(ast.literal_eval(right))
            except (TypeError, ValueError):
                return None
    return None


def with_strict_equality(code: str) -> str:
    """Returns `code` with every ==, != and assertEqual replaced by a call that does not trust the program's classes.

    Plain data equals only plain data; Decimal and Fraction decide by their own ==. A program's class decides only if
    both objects are neither of these. Chains such as a == b == c are left unchanged.

    Raises:
        SyntaxError, TypeError, ValueError: `code` is not Python code.
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
