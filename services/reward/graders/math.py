"""math-verify on model text, with nothing evaluated as Python and every input bounded.

Runs only in a worker process: a short answer such as 5^{5^{5^5}} can keep sympy busy for ever, and the worker's time
limit is what ends it. math-verify's own limits (SIGALRM) are off, since they cannot interrupt big-integer arithmetic.
"""

import re
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from services.reward.compat.math_verify import refuse_eval
from services.reward.scorers.base import FailureReason, ScoringError

refuse_eval()

MAX_ANSWER_CHARS = 2048
"""A longer boxed answer is wrong, and without a box only this much of the end is searched: the parser and the search
patterns are quadratic or worse."""

_BOXED = (LatexExtractionConfig(boxed_match_priority=0),)
_ANYWHERE = (LatexExtractionConfig(), ExprExtractionConfig())
_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_INTEGER = re.compile(r"-?[0-9]{1,1000}")


def grade(*, answer: str, completion: str, require_boxed: bool, **_: object) -> float:
    """1.0 if the completion's answer equals `answer`, else 0.0.

    Its answer is the content of the last closed \\boxed{}, and only that; without one, and unless `require_boxed`, the
    last formula or number near the end. An answer that cannot be read is wrong.

    Raises:
        ScoringError: INVALID_ANSWER, if `answer` cannot be read or compared even with itself.
        Exception: Whatever sympy raised while comparing; it is then unknown whether they are equal.
    """
    text, gold = _parse_gold(answer)
    boxed = last_boxed(completion)
    if boxed is None:
        predicted = () if require_boxed else _parse_end(completion)
        return float(_equal(gold, predicted))
    same = _compare_texts(text, boxed.strip())
    return float(_equal(gold, _parse_answer(boxed)) if same is None else same)


def last_boxed(text: str) -> str | None:
    """Content of the \\boxed{} that closes last, braces balanced, in one pass; None if there is none."""
    content, opened = None, []
    for token in _BRACES.finditer(text):
        if token[0] == "}":
            start = opened.pop() if opened else None
            content = content if start is None else text[start : token.start()]
        elif token[0][-1] == "{" and token[0] != "\\{":
            opened.append(None if token[0] == "{" else token.end())
    return content


@lru_cache(maxsize=1024)
def _parse_gold(answer: str) -> tuple[str, tuple[Any, ...]]:
    boxed = last_boxed(answer)
    text = (answer if boxed is None else boxed).strip()
    # Wrapping only holds if the braces of the answer balance.
    parsed = _parse_answer(text) if last_boxed(f"\\boxed{{{text}}}") == text else ()
    expressions = [value for value in parsed if not isinstance(value, str)]
    try:
        if not expressions or not _equal(expressions, expressions):
            raise ValueError("not an expression that equals itself")
    except Exception as error:
        raise ScoringError(FailureReason.INVALID_ANSWER, f"answer {answer[-100:]!r}: {error}") from error
    return text, parsed


def _parse_end(completion: str) -> tuple[Any, ...]:
    return tuple(parse(completion[-MAX_ANSWER_CHARS:], _ANYWHERE, parsing_timeout=None))


def _parse_answer(text: str) -> tuple[Any, ...]:
    """The sympy expression of `text` and the normalised text; fewer of them, or none, if it cannot be read."""
    if len(text) > MAX_ANSWER_CHARS:
        return ()
    return tuple(parse(f"\\boxed{{{text}}}", _BOXED, parsing_timeout=None))


def _compare_texts(gold: str, predicted: str) -> bool | None:
    """Whether they are equal where no parser is needed to see it: the same text, or two integers."""
    if gold == predicted:
        return True
    if _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(predicted):
        return int(gold) == int(predicted)
    return None


def _equal(gold: Any, predicted: Any) -> bool:
    # Texts come last in what parse() gives and first here: where they are equal, sympy has nothing to do.
    return verify(list(gold)[::-1], list(predicted)[::-1], timeout_seconds=None, raise_on_error=True)


_parse_gold(r"\frac{1}{2}")  # the first parse builds the grammar's tables
