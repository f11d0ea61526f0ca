r"""Reads notations that math-verify does not: `5.`, `1\,000`, `1e3`, inequalities for an interval, `\sqrt{-1}` for
i."""

import re
from decimal import Decimal

import sympy

_SPACES = re.compile(r"\\[,!:; ]|~|\{,\}")
_NUMBER = re.compile(
    r"(?P<sign>[-+−]?)(?:(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+|[0-9]{1,1000})"
    r"(?:\.(?P<rest>[0-9]{0,1000}))?|\.(?P<only>[0-9]{1,1000}))(?:[eE](?P<power>[-+]?[0-9]{1,3}))?"
)
Expression = sympy.Basic | sympy.MatrixBase | str


def plain_number(text: str) -> str:
    """Returns `text`; a decimal number is returned without separators, exponent and trailing point."""
    number = _to_decimal(text)
    return text if number is None else f"{number:f}"


def compare_texts(gold: str, predicted: str) -> bool | None:
    """Compares equal texts, and two decimal numbers exactly, without a parser; returns None for all others."""
    if gold == predicted:
        return True
    numbers = _to_decimal(gold), _to_decimal(predicted)
    return None if None in numbers else numbers[0] == numbers[1]


def _to_decimal(text: str) -> Decimal | None:
    spaced = _SPACES.sub(lambda match: "," if match[0] == "{,}" else " ", text.strip(" $"))
    if (found := _NUMBER.fullmatch(spaced)) is None:
        return None
    whole = re.sub("[, ]", "", found["whole"] or "0")
    digits = f"{found['sign'].replace('−', '-')}{whole}.{found['rest'] or found['only'] or '0'}"
    number = Decimal(f"{digits}e{found['power'] or 0}")
    return number.quantize(1) if number == number.to_integral_value() and abs(number) < 10**20 else number


def unify(gold: Expression, predicted: Expression) -> tuple[Expression, Expression] | None:
    """Returns both in one notation; None if they have no different notations of the same kind."""
    if isinstance(gold, sympy.Set) and (interval := _to_interval(predicted)) is not None:
        return gold, interval
    if isinstance(gold, sympy.Expr) and isinstance(predicted, sympy.Expr):
        units = [[symbol for symbol in side.free_symbols if str(symbol) == "i"] for side in (gold, predicted)]
        if bool(units[0]) != bool(units[1]):
            replaced = {symbol: sympy.I for unit in units for symbol in unit}
            return gold.xreplace(replaced), predicted.xreplace(replaced)
    return None


def _to_interval(expression: Expression) -> sympy.Set | None:
    """Returns the interval that inequalities such as 0 < x < 1 state directly, without solving them."""
    parts = expression.args if isinstance(expression, sympy.And) else (expression,)
    symbols, interval = set(), sympy.S.Reals
    for part in parts:
        if not isinstance(part, sympy.StrictLessThan | sympy.LessThan | sympy.StrictGreaterThan | sympy.GreaterThan):
            return None
        low, high = (part.lts, part.gts)
        is_open = isinstance(part, sympy.StrictLessThan | sympy.StrictGreaterThan)
        if isinstance(low, sympy.Symbol) and not high.free_symbols:
            interval, symbol = interval.intersect(sympy.Interval(-sympy.oo, high, True, is_open)), low
        elif isinstance(high, sympy.Symbol) and not low.free_symbols:
            interval, symbol = interval.intersect(sympy.Interval(low, sympy.oo, is_open, True)), high
        else:
            return None
        symbols.add(symbol)
    return interval if len(symbols) == 1 else None
