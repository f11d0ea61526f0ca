"""Grades mathematical answers with math-verify; evaluates nothing as Python and limits the size of every input.

Runs only in a worker process: a short answer such as 5^{5^{5^5}} can keep sympy busy forever, until the worker's time
limit ends it. math-verify's own time limits (SIGALRM) are off, because they cannot interrupt big-integer arithmetic.
"""

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from functools import lru_cache
from itertools import combinations, product

import sympy
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from services.reward.compat import refuse_eval_of_math_verify
from services.reward.errors import FailureReason, ScoringError
from services.reward.graders import latex
from services.reward.graders.texts import after_reasoning, last_tagged

_SPACES = re.compile(r"\\[,!:; ]|~|\{,\}")
_NUMBER = re.compile(
    r"(?P<sign>[-+−]?)(?:(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+|[0-9]{1,1000})"
    r"(?:\.(?P<rest>[0-9]{0,1000}))?|\.(?P<only>[0-9]{1,1000}))(?:[eE](?P<power>[-+]?[0-9]{1,3}))?"
)
_SCIENTIFIC = re.compile(
    r"(?:(?P<factor>[-+−]?[0-9., ]{1,99}?)\s*(?:\\times|\\cdot|[×*])\s*)?10\s*\^\s*(?P<power>\{[^{}]+\}|[0-9])"
)
_SUBSCRIPT = re.compile(r"(?P<digits>[0-9A-Za-z]+)_(?P<base>\{[0-9]+\}|[0-9])")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
Expression = sympy.Basic | sympy.MatrixBase | str


def plain_number(text: str) -> str:
    """Returns `text`; a decimal number is returned without separators, exponent and trailing point."""
    number = _to_decimal(text)
    return text if number is None else f"{number:f}"


def compare_texts(gold: str, predicted: str) -> bool | None:
    """Compares equal texts, and two decimal numbers exactly, without a parser; returns None for all others.

    A date or a time equals only itself, and numbers of different bases, such as 43_7 and 43_8, differ: the parser would
    compute a difference or a quotient, and ignore bases.
    """
    said = latex.words(gold)
    if gold == predicted or ("\\" in gold + predicted and len(said) > 1 and said == latex.words(predicted)):
        return True
    if _DATE.fullmatch(gold):
        return False
    if (same := latex.same_words(gold, predicted)) is not None:
        return same
    if _is_time(gold):
        return latex.same_time(gold, predicted)
    bases = _SUBSCRIPT.fullmatch(gold), _SUBSCRIPT.fullmatch(predicted)
    if bases[0] and bases[1] and bases[0]["base"].strip("{}") != bases[1]["base"].strip("{}"):
        return False
    numbers = _to_decimal(gold), _to_decimal(predicted)
    if None not in numbers:
        return numbers[0] == numbers[1]
    # 17.5% is 17.5 too, as 50% is 50 to math-verify. Below 1 a share is more likely meant, and 0.5% is not 0.5.
    mine, theirs = (_to_decimal(side.rstrip(" %\\")) for side in (gold, predicted))
    return True if mine is not None and mine == theirs and abs(mine) >= 1 else None


def _is_time(text: str) -> bool:
    """Returns whether the text is a time; what may also be a ratio in its lowest terms, such as 4:15, is none."""
    time = latex.time_of_day(text)
    return time is not None and (time[2] != "" or time[1] == 0 or math.gcd(*time[:2]) > 1)


def _to_decimal(text: str) -> Decimal | None:
    spaced = _SPACES.sub(lambda match: "," if match[0] == "{,}" else " ", text.strip(" $"))
    if scientific := _SCIENTIFIC.fullmatch(spaced):
        power = scientific["power"].strip("{ }").replace("−", "-")
        spaced = f"{(scientific['factor'] or '1').strip()}e{power}"
    if (number := _NUMBER.fullmatch(spaced)) is None:
        return None
    whole = re.sub("[, ]", "", number["whole"] or "0")
    digits = f"{number['sign'].replace('−', '-')}{whole}.{number['rest'] or number['only'] or '0'}"
    value = Decimal(f"{digits}e{number['power'] or 0}")
    return value.quantize(1) if value == value.to_integral_value() and abs(value) < 10**20 else value


def unify(gold: Expression, predicted: Expression) -> tuple[Expression, Expression] | None:
    """Returns both in one notation; None if they have no different notations of the same kind."""
    if isinstance(gold, sympy.Set) and (interval := _to_interval(predicted)) is not None:
        return _to_interval(gold) or gold, interval
    if isinstance(predicted, sympy.Set) and (interval := _to_interval(gold)) is not None:
        return interval, _to_interval(predicted) or predicted
    if isinstance(gold, sympy.Expr) and isinstance(predicted, sympy.Expr):
        units = [[symbol for symbol in side.free_symbols if str(symbol) == "i"] for side in (gold, predicted)]
        if set(units[0]) != set(units[1]):  # the parser takes the i of "3i" as real, that of "3 i" not
            replaced = {symbol: sympy.I for unit in units for symbol in unit}
            return gold.xreplace(replaced), predicted.xreplace(replaced)
    return None


def _to_interval(expression: Expression) -> sympy.Set | None:
    """Returns the interval that inequalities such as 0 < x < 1 state directly, without solving them.

    Inequalities joined by "or" come from the parser as a set. Their union is returned if no two of them overlap:
    others are meant as "and", or are no interval.
    """
    is_union = isinstance(expression, sympy.FiniteSet | sympy.Or)
    if is_union and len({symbol for part in expression.args for symbol in part.free_symbols}) != 1:
        return None
    parts = [_to_one_interval(part) for part in (expression.args if is_union else [expression])]
    found = [part for part in parts if part is not None]
    if not found or len(found) < len(parts):
        return None
    is_apart = all(one.intersect(other).is_empty for one, other in combinations(found, 2))
    return sympy.Union(*found) if is_apart else None


def _to_one_interval(expression: Expression) -> sympy.Set | None:
    parts = expression.args if isinstance(expression, sympy.And) else (expression,)
    symbols, interval = set(), sympy.S.Reals
    for part in parts:
        if not isinstance(part, sympy.StrictLessThan | sympy.LessThan | sympy.StrictGreaterThan | sympy.GreaterThan):
            return None
        low, high = (part.lts, part.gts)
        is_open = isinstance(part, sympy.StrictLessThan | sympy.StrictGreaterThan)
        if isinstance(low, sympy.Symbol) and _is_bound(high):
            interval, symbol = interval.intersect(sympy.Interval(-sympy.oo, high, True, is_open)), low
        elif isinstance(high, sympy.Symbol) and _is_bound(low):
            interval, symbol = interval.intersect(sympy.Interval(low, sympy.oo, is_open, True)), high
        else:
            return None
        symbols.add(symbol)
    return interval if len(symbols) == 1 else None


def _is_bound(expression: object) -> bool:
    return isinstance(expression, sympy.Expr) and not expression.free_symbols and bool(expression.is_extended_real)


refuse_eval_of_math_verify()


MAX_ANSWER_CHARS = 2048
"""Maximum length of an answer, because the parser and the search patterns take quadratic time or more. A longer boxed
answer is wrong; without a box, only this much of the end of a completion is searched."""

_EXPONENT = re.compile(r"(?<![\w.])[0-9]{1,20}(?:\.[0-9]{1,20})?[eE][-+]?[0-9]{1,2}(?!\w)")
_BOXED = (LatexExtractionConfig(boxed_match_priority=0),)
_ANYWHERE = (LatexExtractionConfig(), ExprExtractionConfig())
_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_NO_ANSWER = re.compile(r"(?:[\s.…]|\\[lc]?dots)*|\s*(?:\\text\{)?(?:your |final )?answer\}?\s*", re.IGNORECASE)
_CHOICE = re.compile(r"\s*(?:\\(?:text|textbf|mathrm|mathbf)\s*\{)?\s*\(?[A-J]\)?\s*\}?\s*")
# The letter of a choice, such as in "The answer is (B).", if no other one stands beside it.
_SAID = re.compile(
    r"\b(?i:answer|(?:correct|right|best)\s(?:option|choice))\b(?i:\s+is)?(?:[:\s$(*]|\\(?:text|textbf|mathrm|mathbf)\s*\{)*"
    r"([A-J])(?!\)?[\s,/&]*(?:or\b|and\b|[,/&])\s*\(?[A-J]\b)(?=[\s.,;:)}$*]*(?:\n|\Z)|[.:,;)]+\s)"
)
_WORDS = re.compile(r"(?<![A-Za-z\\])(?!(?:and|or)\b)[A-Za-z]{2,}|\$|\\[\[(]|\A\s*=")  # what is no formula as a whole
_END_MARK = re.compile(r"(?<=[\w)}\]%!])[.,;](?=\}?\Z)")  # of the sentence that the answer ends
_NAME = re.compile(r"[A-Za-z]\s*=")
_BOLD = re.compile(r"(?<![\w*])\*\*(?=\S)([^*\n]+)(?<=\S)\*\*(?![\w*])")
_JOINS = re.compile(r"[,;]|and|or|\\q?quad")
_BETWEEN = re.compile(
    r"(?:[\s$*,;]|and|or|\\q?quad|\\[\[\]();:, ]|\\text\s*\{[\s,]*(?:and|or)[\s,]*\}"
    r"|[A-Za-z](?:_(?:\w|\{\w{1,9}\}))?\s*=)*"
)


def grade(*, answer: str, completion: str, require_boxed: bool, **_: object) -> float:
    """Returns 1.0 if the completion's answer equals `answer`, else 0.0.

    The completion's answer is the content of the last closed \\boxed{} after the reasoning, or of the last list of
    boxes, which may all say the same. If there is none, and unless `require_boxed`, it is the last <answer>, or the
    last formula or number near the end. An answer that cannot be parsed is wrong.

    Raises:
        ScoringError: INVALID_ANSWER, if `answer` cannot be parsed or does not equal itself.
        Exception: Any exception that sympy raises while comparing, after which equality is unknown.
    """
    text, gold = _parse_gold(latex.in_latex(answer))
    completion = latex.in_latex(after_reasoning(completion))
    boxes = boxed(completion)
    if not boxes:
        if require_boxed:
            return 0.0
        completion = _BOLD.sub(r"\1", completion)
        if (tagged := last_tagged(completion)) is not None:
            if latex.choice(tagged) or _WORDS.search(tagged) is None:
                return float(_is_answer(text, gold, tagged))
            completion = tagged
        if _CHOICE.fullmatch(text) and (letters := _SAID.findall(completion)):
            return float(_is_answer(text, gold, letters[-1]))
        predicted = _parse_end(completion)
        texts = [value for value in predicted if isinstance(value, str)]
        same = compare_texts(text, texts[-1]) if texts else None
        return float(_equal(gold, predicted) if same is None else same)
    if _is_answer(text, gold, ", ".join(boxes)):
        return 1.0
    return float(len(boxes) > 1 and all(_is_answer(text, gold, content) for content in boxes))


def _is_answer(text: str, gold: Sequence[Expression], content: str) -> bool:
    if len(content := content.strip()) > MAX_ANSWER_CHARS:
        return False
    mine, content = _without_one_sided_parts(text, content)
    if mine != text:
        text, gold = _parse_gold(mine)
    content = _normalized(content)
    same = compare_texts(text, content)
    return _equal(gold, _parse_answer(content)) if same is None else same


def _without_one_sided_parts(gold: str, content: str) -> tuple[str, str]:
    """Returns both without what only one of them says: a letter beside the value, or the names of values.

    Values that only one side names have an order: x=2, y=3 is (2, 3), and not (3, 2).
    """
    chosen = latex.choice(gold), latex.choice(content)
    if any(chosen):
        # Of two with both, the letters too: the right value beside another letter is another choice.
        is_other = chosen[0] and chosen[1] and chosen[0][0] != chosen[1][0]
        place = 0 if is_other or any(map(_CHOICE.fullmatch, (gold, content))) else 1
        mine, theirs = (pair[place] if pair else side for pair, side in zip(chosen, (gold, content), strict=True))
        return mine, theirs
    names = latex.named(gold), latex.named(content)
    if names[0] and not _NAME.search(content):
        return f"({', '.join(names[0].values())})", content
    if names[1] and not _NAME.search(gold):
        return gold, ", ".join(names[1][name] for name in sorted(names[1]))
    return gold, content


def _normalized(text: str) -> str:
    return plain_number(latex.ratio(latex.without_units(latex.both_signs(_END_MARK.sub("", text.strip())))))


def boxed(text: str) -> list[str]:
    """Returns the content of the \\boxed{} that closes last, with balanced braces, behind those of its list.

    Boxes are a list if only commas, "and", "or" and the like stand between them, and all or none of them are letters:
    others say the answer twice. A box that shows a form, such as \\boxed{...}, counts only if there is no other.
    """
    boxes = _all_boxed(text)
    boxes = [box for box in boxes if not _NO_ANSWER.fullmatch(text[box[1] : box[2]])] or boxes[-1:]
    contents = []
    for index in range(len(boxes) - 1, -1, -1):
        _, start, end = boxes[index]
        between = text[end + 1 : boxes[index + 1][0]] if contents else ""
        if contents and not (_JOINS.search(between) and _BETWEEN.fullmatch(between)):
            break
        if text[start:end] not in contents:
            contents.insert(0, text[start:end])
    return contents if len({_CHOICE.fullmatch(content) is None for content in contents}) == 1 else contents[-1:]


def _all_boxed(text: str) -> list[tuple[int, int, int]]:
    """Returns the start of each outermost \\boxed{}, and start and end of its content."""
    boxes, opened = [], []
    for token in _BRACES.finditer(text):
        if token[0] == "}":
            begin = opened.pop() if opened else None
            while begin and boxes and boxes[-1][0] > begin.start():
                boxes.pop()
            boxes += [(begin.start(), begin.end(), token.start())] if begin else []
        elif token[0][-1] == "{" and token[0] != "\\{":
            opened.append(None if token[0] == "{" else token)
    return boxes


@lru_cache(maxsize=1024)
def _parse_gold(answer: str) -> tuple[str, tuple[Expression, ...]]:
    text = _normalized(", ".join(boxed(answer)) or answer)
    # Wrapping in \boxed{} only works if the braces of the answer are balanced.
    parsed = _parse_answer(text) if boxed(f"\\boxed{{{text}}}") == [text] else ()
    expressions = [value for value in parsed if not isinstance(value, str)]
    if _DATE.fullmatch(text) or _is_time(text) or latex.same_words(text, text):
        return text, parsed
    try:
        if not expressions or not _equal(expressions, expressions):
            raise ValueError("not an expression that equals itself")
    except Exception as error:
        raise ScoringError(FailureReason.INVALID_ANSWER, f"answer {answer[-100:]!r}: {error}") from error
    return text, parsed


def _parse_end(completion: str) -> tuple[Expression, ...]:
    end = _EXPONENT.sub(lambda match: plain_number(match[0]), completion[-MAX_ANSWER_CHARS:])
    return tuple(parse(end[-MAX_ANSWER_CHARS:], _ANYWHERE, parsing_timeout=0))


def _parse_answer(text: str) -> tuple[Expression, ...]:
    """Returns the sympy expression and the normalized text of `text`; one or none of them if it cannot be parsed."""
    if len(text) > MAX_ANSWER_CHARS:
        return ()
    return tuple(parse(f"\\boxed{{{text}}}", _BOXED, parsing_timeout=0))


def _equal(gold: Sequence[Expression], predicted: Sequence[Expression]) -> bool:
    """Returns whether any of `gold` equals any of `predicted`. What takes too much stack or is too large is unequal."""
    gold, predicted = ([_without_point(value) for value in side] for side in (gold, predicted))
    try:
        if any(
            _is_list(one) and _to_interval(other)
            for pair in product(gold, predicted)
            for one, other in (pair, pair[::-1])
        ):
            return False  # math-verify takes 1 < x < 2 for the list 1, 2
        # parse() returns texts last. Compare them first, because sympy has nothing to do if they are equal.
        if verify(list(gold)[::-1], list(predicted)[::-1], timeout_seconds=None, raise_on_error=True):
            return not _are_far(gold, predicted)
        pairs = [unify(mine, theirs) for mine in gold for theirs in predicted]
        return any(verify(*pair, timeout_seconds=None, raise_on_error=True) for pair in pairs if pair)
    except (RecursionError, OverflowError, ValueError):  # the last one from zip() for lists of different lengths
        return False


def _is_list(expression: Expression) -> bool:
    return isinstance(expression, sympy.FiniteSet) and _to_interval(expression) is None


def _without_point(expression: Expression) -> Expression:
    """Returns x != 0 as the set of all other numbers; math-verify compares it with no inequality."""
    if isinstance(expression, sympy.Unequality) and expression.lhs.is_Symbol and _is_bound(expression.rhs):
        return sympy.S.Reals - sympy.FiniteSet(expression.rhs)
    return expression


def _are_far(gold: Sequence[Expression], predicted: Sequence[Expression]) -> bool:
    """Returns whether two numbers differ that math-verify takes as equal.

    It compares numbers to six decimal places, to which all small numbers are equal, and takes as 0 what is small within
    them, such as 1/50!. Exact numbers may not differ, others below 1e-5 by a twentieth of the larger one.
    """
    numbers = [
        [value for value in side if isinstance(value, sympy.Expr) and not value.free_symbols]
        for side in (gold, predicted)
    ]
    if not all(numbers) or set(map(str, gold)) & set(map(str, predicted)):
        return False
    pair = [side[0] for side in numbers]
    if not any(value.is_Number or value.has(*_NOT_EXACT) for value in pair):
        return _differ(pair[0], pair[1])
    mine, theirs = (abs(sympy.N(value, 15)) for value in pair)
    if not (mine.is_Float and theirs.is_Float and 0 < max(mine, theirs) < 1e-5):
        return False
    difference = abs(sympy.N(pair[0] - pair[1], 15))
    return bool(difference > max(mine, theirs) / 20)


_NOT_EXACT = (sympy.Float, sympy.UnevaluatedExpr, sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit)
"""What takes too long to compute exactly, is rounded, or is a percentage: 50% may also be 50."""


def _differ(mine: sympy.Expr, theirs: sympy.Expr) -> bool:
    """Returns whether two exact numbers differ, irrational ones by more than 1e-12 of the larger one."""
    difference = (mine - theirs).doit()
    if difference.is_Rational:
        return difference != 0
    largest = max(abs(sympy.N(mine, 30)), abs(sympy.N(theirs, 30)))
    return bool(abs(sympy.N(difference, 30)) > largest * sympy.Float("1e-12"))


_parse_gold(r"\frac{1}{2}")  # the first parse builds the tables of the grammar
