from collections.abc import Callable

from sympy import Expr

parse_expr: Callable[..., Expr]
