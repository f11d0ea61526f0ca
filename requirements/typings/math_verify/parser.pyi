from collections.abc import Callable

from sympy import Expr

parse_expr_cached: Callable[[str], Expr]
