"""Scores a completion by comparing text with the answer, by its format or by its length."""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from importlib.metadata import version

from services.common.config.reward import (
    AnswerConfig,
    ExactConfig,
    FormatConfig,
    Gsm8kConfig,
    LengthConfig,
    MathConfig,
    RewardConfig,
)
from services.reward.errors import FailureReason, ScoringError
from services.reward.graders.texts import after_reasoning, last_tagged, normalize, with_fractions
from services.reward.scorers.base import Item, Scorer, WorkerScorer, gather_scores, share_s


class ExactScorer(Scorer):
    """Scores 1 if completion and answer are equal after stripping whitespace, else 0."""

    version = "2"

    def __init__(self, config: ExactConfig, reward: RewardConfig):
        self._ignore_case = config.ignore_case

    async def score(self, item: Item) -> float:
        completion, answer = (unicodedata.normalize("NFC", text).strip() for text in (item.completion, item.answer))
        if self._ignore_case:
            completion, answer = (unicodedata.normalize("NFC", text.casefold()) for text in (completion, answer))
        return float(completion == answer)


class AnswerScorer(Scorer):
    """Scores 1 if the text in the last <answer> is one of the accepted answers, else 0."""

    version = "4"

    def __init__(self, config: AnswerConfig, reward: RewardConfig):
        self._key = config.answers_key

    async def score(self, item: Item) -> float:
        answers = [item.answer] if self._key is None else item.column(self._key, "answers_key")
        if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
            raise ScoringError(FailureReason.INVALID_ANSWER, f"{self._key} is not a list of texts: {answers!r:.200}")
        accepted = set(map(normalize, answers)) - {""}
        if not accepted:
            raise ScoringError(FailureReason.INVALID_ANSWER, "every accepted answer is empty")
        text = last_tagged(after_reasoning(item.completion))
        return float(text is not None and normalize(text) in accepted)


class FormatScorer(WorkerScorer):
    """Scores 1 if the whole completion matches, else 0. Uses workers, because matching can take exponential time."""

    version = "1"

    def __init__(self, config: FormatConfig, reward: RewardConfig):
        super().__init__("services.reward.graders.texts:match_format", {"pattern": config.pattern}, reward)


# A minus is a sign only if it cannot be part of a difference (5-3) or a range (3-5). What the first lines match is no
# number of its own: an exponent, an index, a name such as CO2, a unit such as m2, month and day of a date, or a time
# but for a full hour. R42, P42 and RM42 are money, $42k is 42,000, and 1,80,000 is grouped as in India.
_NUMBER = re.compile(
    r"(?:(?:\^|(?<=[A-Za-z0-9)}])_(?!\d+_))\{?[-+−]?|(?<![A-Za-z0-9])(?!(?:R|P|RM)[0-9])[A-Z]{1,2}"
    r"|(?<![A-Za-z])[ckm]?m(?=[23]\b))[0-9]+(?:\.[0-9]+)?|(?:[0-9]{1,4}/){2}(?=[0-9])"
    r"|(?<![0-9:])[0-9]{1,2}:(?!00)[0-5][0-9](?![0-9])"
    r"|(?P<sign>(?<![\w)])[-−])?(?P<money>\\?\$)?(?:(?P<whole>[0-9]{1,30}) (?=[0-9]{1,30}/[0-9]))?"
    r"(?P<digits>(?:[0-9]{1,3}(?:[,\u00a0\u202f][0-9]{3})+(?![0-9])|[0-9]{1,2}(?:,[0-9]{2})+,[0-9]{3}(?![0-9])"
    r"|[0-9]+)(?:\.[0-9]+)?|(?<![A-Za-z])\.[0-9]+)"
    r"(?:(?P<power>[eE][-+]?[0-9]{1,3})(?!\w)|:00(?![0-9])|(?P<thousands>(?(money)[kK](?!\w)|(?!)))"
    r"|/(?!(?:19|20)[0-9]{2}\b)(?P<below>0{0,9}[1-9][0-9]{0,30})(?![0-9/]))?"
)

_MARKER = re.compile(r"(?<!#)####(?!#)")
_BOX = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_SPACES = re.compile(r"\\[!,;: ](?=[0-9]{3})")
# After a marker, where the answer stands, a minus in front is no dash, and digits in groups of three are one number.
_MINUS = re.compile(r"\A([\s*$]*-)\s+(?=\\?\$?\.?[0-9])")
_GROUPS = re.compile(r"(?<![\w.,^])[0-9]{1,3}(?: [0-9]{3})+(?![0-9/])")
_EQUATION = re.compile(r"[^0-9]*[0-9][0-9,.]*[\s%A-Za-z]{0,40}(?:[-+*/×÷]|(?<=\s)x|\\times|\\cdot)\s*[\\$(]*[0-9]")
_FRACTION = re.compile(r"(?P<whole>(?<=[0-9]))?\\[dt]?frac\{([0-9]{1,30})\}\{([0-9]{1,30})\}")
_STEP = re.compile(r"\W*[0-9]+[.):]\s+[^\W\d]")
_BEGINS = re.compile(r"(?:\\[a-z]+\{|[^\w\n]|[A-Z]{3}\s)*[0-9]")
_SAYS = re.compile(r"\b(?:answer|result|total)\b(?:\s++is\b)?[^\w\n]*+[0-9]", re.IGNORECASE)


def _numbers(text: str) -> Iterator[re.Match[str]]:
    return (number for number in _NUMBER.finditer(text) if number["digits"])


def _value(number: re.Match[str] | None) -> Decimal | Fraction | None:
    if number is None:
        return None
    sign, digits = "-" if number["sign"] else "", re.sub("[,\u00a0\u202f]", "", number["digits"])
    # Fractions of thousands of digits, which only a hostile text has, would take seconds.
    power = "e3" if number["thousands"] else number["power"]
    if not (power or number["below"] or number["whole"]) or len(number[0]) > 200:
        return Decimal(sign + digits)
    part = Fraction(Decimal(digits)) * Fraction(Decimal(f"1{power or 'e0'}")) / int(number["below"] or 1)
    return int(f"{sign}1") * (int(number["whole"] or 0) + part)


class Gsm8kScorer(Scorer):
    """Scores 1 if the final numbers are equal, else 0. The answer may be a bare number or a whole GSM8K solution."""

    version = "9"

    def __init__(self, config: Gsm8kConfig, reward: RewardConfig):
        self._require_marker = config.require_marker

    async def score(self, item: Item) -> float:
        gold, _ = _final_number(item.answer)
        if gold is None:
            raise ScoringError(FailureReason.INVALID_ANSWER, f"no number in the answer {item.answer[-100:]!r}")
        number, is_marked = _final_number(after_reasoning(item.completion))
        return float((is_marked or not self._require_marker) and number == gold)


def _final_number(text: str) -> tuple[Decimal | Fraction | None, bool]:
    """Returns the first number after the last marker, on its line, and whether there is a marker.

    Without a marker it is the first number in the last \\boxed{}, else the last number. A last line of `####` without a
    number gives none.
    """
    text = _SPACES.sub("", with_fractions(text).replace("{,}", ",")).rstrip()
    text = _FRACTION.sub(lambda found: f"{'' if found['whole'] is None else ' '}{found[2]}/{found[3]}", text)
    for marker in reversed(list(_MARKER.finditer(text))):
        line, more, _ = text[marker.end() :].partition("\n")
        if not more or not _is_heading(line):
            return _value(_result(line)), True
    box = max(_BOX.finditer(text), key=re.Match.start, default=None)
    last = (_result(box[1]) if box else None) or max(_numbers(text), key=re.Match.start, default=None)
    return _value(last), False


def _result(line: str) -> re.Match[str] | None:
    """Returns the first number of a line; of an equation, such as 48 + 24 = 72, the first behind the last `=`."""
    result = line.rpartition("=")[2]
    line = result if _EQUATION.match(line) and re.search("[0-9]", result) else line
    return next(_numbers(_GROUPS.sub(lambda number: number[0].replace(" ", ""), _MINUS.sub(r"\1", line))), None)


def _is_heading(line: str) -> bool:
    """Returns whether the line after `####`, which is not the last, is a heading of Markdown, and no answer.

    An answer begins with its number or says that it is one. A number that counts steps has a point and words behind it.
    """
    return bool(_STEP.match(line)) or not (_BEGINS.match(line) or _SAYS.search(line))


class LengthScorer(Scorer):
    """Scores 0 up to target_tokens and -1 from max_tokens on: DAPO's soft overlong punishment (2503.14476, eq. 13)."""

    version = "1"

    def __init__(self, config: LengthConfig, reward: RewardConfig):
        self._target_tokens = config.target_tokens
        self._max_tokens = config.max_tokens

    async def score(self, item: Item) -> float:
        over = (item.num_tokens - self._target_tokens) / (self._max_tokens - self._target_tokens)
        return -min(max(over, 0.0), 1.0)


class MathScorer(WorkerScorer):
    """Scores 1 if the last boxed answer equals the dataset's, else 0. See services/reward/graders/math.py.

    An answer such as 9^{9^9}, on which sympy does not end or takes all memory, is wrong.
    """

    version = f"9/math-verify-{version('math-verify')}"
    num_spares, num_tries = 1, 1  # score_group tries again

    def __init__(self, config: MathConfig, reward: RewardConfig):
        super().__init__("services.reward.graders.math:grade", {"require_boxed": config.require_boxed}, reward)
        self._num_workers, self._group_timeout_s = reward.num_workers, reward.group_timeout_s

    async def score_group(self, items: Sequence[Item]) -> list[float | ScoringError]:
        """Scores each item. Time that an item waits for others does not count against its limit."""
        limit_s = share_s(self._group_timeout_s, num_samples=len(items), num_slots=self._num_workers)
        results = await self._grade_all(items, limit_s)
        bombs = [index for index, result in enumerate(results) if self._is_bomb(result)]
        if not bombs:
            return results
        without = replace(items[0], completion="")  # takes as long only if the dataset's answer is at fault
        (gold,) = await self._grade_all([without], limit_s)
        # Something else may have killed a worker; a text that kills two of them is at fault.
        crashed = [index for index in bombs if self._is_bomb(results[index], FailureReason.CRASHED)]
        again = await self._grade_all([items[index] for index in crashed], limit_s)
        results = dict(enumerate(results)) | dict(zip(crashed, again, strict=True))
        zero = gold if isinstance(gold, ScoringError) else 0.0
        return [zero if self._is_bomb(results[index]) else results[index] for index in range(len(items))]

    async def _grade_all(self, items: Sequence[Item], limit_s: float) -> list[float | ScoringError]:
        return await gather_scores(self._pool.call({**item.fields(), **self._kwargs}, limit_s) for item in items)

    def _is_bomb(self, result: float | ScoringError, *reasons: FailureReason) -> bool:
        """Returns whether the text may have taken all time or memory of a worker."""
        reasons = reasons or (FailureReason.TIMEOUT, FailureReason.CRASHED)
        return isinstance(result, ScoringError) and result.reason in reasons
