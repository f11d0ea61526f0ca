"""Writes answers in the LaTeX that math-verify's parser reads as they are meant."""

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction

from services.reward.graders.texts import normalize, with_fractions

_CHARACTERS = {"∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "·": r"\cdot ", "π": r"\pi ", "∅": r"\emptyset "}
_CHARACTERS |= dict.fromkeys("°º˚", r"^\circ ") | dict.fromkeys("\u00a0\u2009\u202f", " ")
_IN_LATEX = str.maketrans(_CHARACTERS)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_WHOLE = r"(?<![\w.)}/^])([0-9]+)(?: |\\[,;:])+"  # and the space behind it, before the fraction of a mixed number
_PART = r"\s*(?:\{\s*([0-9]{1,30})\s*\}|([0-9]))"
_MIXED_SHARE = re.compile(
    rf"(?<![\w.)}}/^])([0-9]{{1,30}})(?:(?: |\\[,;:])+([0-9]{{1,30}})/([0-9]{{1,30}})"
    rf"|(?: |\\[,;:])*\\[dt]?frac{_PART}{_PART})(?:\s|\\[,;:!])*\\?%"
)
_REPEATING = re.compile(
    r"(?<![\w.,])(?P<whole>[0-9]{1,9})\.(?P<once>[0-9]{0,9})"
    r"(?:\\(?:overline|bar)\s*(?:\{(?P<bar>[0-9]{1,9})\}|(?P<one>[0-9]))"
    r"|\\dot\s*\{?(?P<first>[0-9])\}?(?:(?P<inner>[0-9]{0,9})\\dot\s*\{?(?P<last>[0-9])\}?)?)"
)
_WORDS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_ORDINAL, _BASE = (
    rf"\\(?:text|textrm|mathrm|mbox)\s*\{{\s*{word}\s*\}}" for word in ("(?:st|nd|rd|th)", f"({'|'.join(_WORDS)})")
)


def _repeating(found: re.Match[str]) -> str:
    """Returns a repeating decimal, such as 0.1\\overline{6}, as a fraction."""
    again = found["bar"] or found["one"] or "".join(found[part] or "" for part in ("first", "inner", "last"))
    once = Fraction(int(found["whole"] + found["once"]))
    value = (once + Fraction(int(again), 10 ** len(again) - 1)) / 10 ** len(found["once"])
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _improper(found: re.Match[str]) -> str:
    """Returns a mixed number of percent, such as 62\\frac{1}{2}\\%, with one fraction."""
    whole, above, below = (int(number) for number in found.groups() if number)
    return f"\\frac{{{whole * below + above}}}{{{below}}}\\%"


_BOLD = r"\\(?:mathbf|boldsymbol|bm)"
_ARROW = r"\\(?:hat|vec|overrightarrow)"
_LETTER = r"\\(?:pi|phi|theta|alpha|beta|gamma|lambda|mu|omega)(?![A-Za-z])"
_BRACED = r"\{(?:[^{}]|\{[^{}]*\})*+\}"
_ARGUMENT = rf"\s*(?:{_BRACED}|[0-9A-Za-z])"
_REWRITES: Sequence[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = (
    (re.compile(r"\\degree(?![A-Za-z])"), r"^\\circ "),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset "),
    (re.compile(r"(?<!\\)(?:~|\\ )"), " "),
    (
        re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹](?![⁰¹²³⁴⁵⁶⁷⁸⁹⁻])(?<![⁰¹²³⁴⁵⁶⁷⁸⁹⁻].)"),
        lambda found: f"^{found[0].translate(_SUPERSCRIPTS)}",
    ),
    (re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+"), lambda found: f"^{{{found[0].translate(_SUPERSCRIPTS)}}}"),
    (re.compile(r"√\s*(?:\(([^()]*)\)|([0-9.]+|[A-Za-z]))"), lambda found: rf"\sqrt{{{found[1] or found[2]}}}"),
    (re.compile(r"(?:[€£¥₹]|\\pounds(?![A-Za-z]))\s*(?=[0-9])|(?<=[0-9])\s*[€£¥₹]"), ""),
    (re.compile(r"\\(?:big|Big|bigg|Bigg)[lrm]?(?![A-Za-z])\s*"), ""),
    (re.compile(r"(?<=\\\\)\s*\[\s*-?[0-9.]+\s*(?:pt|em|ex|mm|cm|in|mu|px)\s*\]"), " "),  # space behind a row
    # The parser takes bold letters as units, and drops everything from the first to the last.
    (re.compile(rf"{_ARROW}\s*\{{\s*({_BOLD}\s*\{{[a-z]\}})\s*\}}"), r"\1"),
    (re.compile(rf"(?:{_BOLD}|{_ARROW})(?:\s*\{{\s*\\?([a-z])(?:math)?\s*\}}|\s+([a-z])(?![A-Za-z]))"), r" \1\2"),
    (re.compile(r"\\(?:tiny|small|normalsize|large|Large|LARGE|huge|Huge|boldsymbol|bm)(?![A-Za-z])"), " "),
    (re.compile(r"\^\s*-\s*([0-9]+(?:\.[0-9]+)?|[A-Za-z])"), r"^{-\1}"),
    (re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])"), r"\\pi"),
    (re.compile(r"\\(?:text)?color\s*\{[^{}]*\}"), " "),
    (re.compile(r"\\mathrm\s*\{([ie])\}"), r" \1"),
    # The parser reads 2^\frac{1}{3} as 1/3, and \frac\pi2 and \sqrt\pi not at all.
    (re.compile(rf"(\\[dt]?frac)\s*({_LETTER})"), r"\1{\2}"),
    (re.compile(rf"(\\[dt]?frac\s*(?:{_BRACED}|[0-9]))\s*({_LETTER}|(?<=\}})[A-Za-z])"), r"\1{\2}"),
    (re.compile(rf"(\^|\\sqrt(?:\[[^\[\]]*\])?)\s*({_LETTER}|\\[dt]?frac{_ARGUMENT}{_ARGUMENT})"), r"\1{\2}"),
    (re.compile(r"(\\sqrt\[[^\[\]]*\])\s*([0-9A-Za-z])"), r"\1{\2}"),
    (re.compile(r"\\lg(?![A-Za-z])"), r"\\log_{10}"),
    (re.compile(r"\\log_(?:\s*e(?![A-Za-z])|\{\s*e\s*\})"), r"\\ln "),
    (re.compile(r"\\langle(?![A-Za-z])"), "("),
    (re.compile(r"\\rangle(?![A-Za-z])"), ")"),
    (re.compile(rf"(?<=[0-9])\^(?:{_ORDINAL}|\{{{_ORDINAL}\}})"), ""),
    (re.compile(rf"_(?:{_BASE}|\{{{_BASE}\}})"), lambda found: f"_{{{_WORDS.index(found[1] or found[2]) + 2}}}"),
    (_REPEATING, _repeating),
    (re.compile(r"_(?:\{\\(max|min)\}|\\(max|min)(?![A-Za-z]))"), r"_{\1\2}"),
    (re.compile(r"(\\boxed\s*\{\s*|\A\s*)\\approx(?![A-Za-z])"), r"\1"),
    # The parser splits a number behind a power: 50^{2} into 5 times 0^{2}.
    (re.compile(r"((?<![\\A-Za-z])[A-Za-z0-9)]\^\{[^{}]*\})\s*(?=[0-9])"), r"\1\\cdot "),
    (re.compile(r"(?<=[0-9}])\s*(?:\\text\s*\{\s*per ?cent\s*\}|per ?cent(?![A-Za-z]))"), r"\\%"),
    (_MIXED_SHARE, _improper),  # of which the parser reads only the fraction
    # The parser reads the two whole numbers of a mixed number as a sum, 7 3/8 as (7 + 3)/8.
    (re.compile(rf"{_WHOLE}([0-9]+)/([0-9]+)(?![\w/])"), r"(\1+\2/\3)"),
    (re.compile(rf"{_WHOLE}(\\[dt]?frac)(?![A-Za-z])"), r"\1\2"),
)


def in_latex(text: str) -> str:
    """Returns the text with LaTeX for characters and forms that the parser does not read as they are meant."""
    text = with_fractions(text).translate(_IN_LATEX)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text


_UNIT = re.compile(r"\\(?:text|textrm|textbf|mathrm|mbox)\s*\{([^{}]*)\}(?:\^(?:[0-9]|\{[0-9]\}))?")
_WORDS_IN = r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|mbox)\s*\{"
_WRAPPED = re.compile(rf"{_WORDS_IN}([^{{}}]*)\}}")
_AMOUNT = (
    r"(?:[A-Za-z]\s*=\s*)?[-+]?(?=[0-9.\\])"
    r"(?:[0-9./]|(?:,|\{,\})(?=[0-9]{3})|\\[dt]?frac(?:\{(?:[0-9]|\\sqrt\{[0-9]+\}|\\pi)+\}){2}|\\sqrt\{[0-9]+\}"
    r"|\\pi(?![A-Za-z]))+"
)
_JOIN = r"(?:[\s,;$]|\\[,;:! $]|\band\b|\bor\b)*"
# No two neighbors match the same text: a long text that does not match takes linear time.
_AMOUNTS = re.compile(rf"{_JOIN}{_AMOUNT}{_JOIN}(?:(?:{_UNIT.pattern}{_JOIN})+{_AMOUNT}{_JOIN})+{_UNIT.pattern}\.?")
_RELATES = re.compile(r"\b(?:of|per|for|every|each|from|at|with|when|if|to|than)\b")


# What follows an amount and makes another number of it, or is no word: 2 xyz is a product.
_MULTIPLES = (
    r"(?:hundred|thousand|lakh|crore|\w*illion|dozen|ten|third|quarter"
    r"|\w*(?:four|fif|six|seven|eigh|nin|ten|elev|twelf|een|ie|hundred|thousand|illion)th)s?"
)
_OPERATIONS = (
    r"half|halves|squared|cubed|more|less|factorial|choose|power|modulo|root|radical|sqrt|times(?=\s)|over|divided"
    r"|multiplied|(?:a(?:rc)?)?(?:sin|cos|tan|cot|sec|csc|log|exp)h?[a-rt-z]?"
)
_SYMBOLS = r"infinity|alpha|beta|gamma|delta|epsilon|zeta|theta|lambda|sigma|omega|[b-df-hj-np-tv-z]{3,}|abc\w*"
_ANYWHERE = f"and|or|below|minus|negative|plus|zero|one|{'|'.join(_WORDS)}"
_COUNTED = re.compile(
    rf"({_AMOUNT}|\([0-9]+\+[0-9]+/[0-9]+\))\s+(?!.*\b(?:{_ANYWHERE})\b)(?!(?:{_MULTIPLES}|{_OPERATIONS}|{_SYMBOLS})\b)"
    r"(?:(?:[a-z]{4,}|in|oz|ml|cup|usd|eur)(?:[\s/](?:a|[a-z]{2,})){0,4}"
    r"|(?:[ckm]?m|ft|mi)\s?/\s?(?:s|sec|second|h|hr|hour|min|minute)"
    r"|(?:[ckm]m|ft|in|yd|mi|units?)\s?\^(?:[23]|\{[23]\}))",
    re.IGNORECASE,
)
"""Matches an amount with words behind it, such as 18 dollars a day, if none of them changes it."""


_SCALES = {"hundred": 2, "thousand": 3, "lakh": 5, "million": 6, "crore": 7, "billion": 9, "trillion": 12}
_SCALED = re.compile(rf"(?:\\?\$)?([0-9][0-9,]{{0,30}}(?:\.[0-9]{{1,30}})?)\s+({'|'.join(_SCALES)})s?\b", re.IGNORECASE)


def without_units(text: str) -> str:
    """Returns several amounts, such as 2\\text{ hours }30\\text{ minutes}, as their numbers, and one with plain words,
    such as 18 dollars or 5 million, as its number; all other text as it is.

    The parser drops everything from the first unit to the last. Amounts of different units have an order: (2, 30).
    """
    plain = _WRAPPED.sub(r"\1", text).strip()
    if scaled := _SCALED.match(plain):
        value = Decimal(scaled[1].replace(",", "")).scaleb(_SCALES[scaled[2].lower()])
        plain = text = f"{value:f}{plain[scaled.end() :]}"
    if counted := _COUNTED.fullmatch(plain):
        return counted[1]
    words = [found[1].lower() for found in _UNIT.finditer(text)]
    if not _AMOUNTS.fullmatch(text.strip()) or any(map(_RELATES.search, words)):
        return text
    units = {re.sub(r"\b(?:and|or)\b|[^a-z/]", "", word) for word in words} - {""}
    listed = ", ".join(re.findall(_AMOUNT, _UNIT.sub(" ", text)))
    return f"({listed})" if len(units) > 1 and "=" not in listed else listed


def ratio(text: str) -> str:
    """Returns a ratio of three parts or more, such as 1:2:3, as a list of the others over the first.

    The parser reads it as a quotient, in which the order of the others does not count.
    """
    parts = re.split(r"(?<!\\):", text.rpartition("=")[2])
    numbers = [_UNIT.sub("", part).strip(" $") for part in parts]
    if len(parts) < 3 or not all(re.fullmatch(_AMOUNT, number) for number in numbers) or set(numbers[0]) <= {*"0."}:
        return text
    shares = ", ".join(f"\\frac{{{number}}}{{{numbers[0]}}}" for number in numbers[1:])
    return f"({shares})"


_PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])")


def both_signs(text: str) -> str:
    """Returns an answer with one \\pm within braces, such as \\frac{1\\pm\\sqrt{5}}{2}, as its two values.

    The parser reads \\pm only outside of braces.
    """
    before, *after = _PLUS_MINUS.split(text)
    if len(after) != 1 or "," in text or "\\{" in text or before.count("{") == before.count("}"):
        return text
    return f"{before}+{after[0]}, {before}-{after[0]}"


_TIME = re.compile(r"([0-9]{1,2}):([0-5][0-9]) ?([ap]m)?")


def words(text: str) -> str:
    """Returns what a text with words says, such as \\text{July 4}, in one form; empty if it is a formula."""
    plain = _WRAPPED.sub(r"\1", text)
    return "" if re.search(r"[\\^_{}]", plain) else normalize(plain)


_WORD = re.compile(r"[A-Z]{3,}|[A-Za-z]{4,}")


def same_words(one: str, other: str) -> bool | None:
    """Returns whether two words, such as CAB, are the same; None if they may be products of letters, such as
    xyz, or abcd and bacd."""
    plain = [_WRAPPED.sub(r"\1", text).strip() for text in (one, other)]
    if not all(map(_WORD.fullmatch, plain)) or (
        plain[0] != plain[1] and all(map(str.islower, plain)) and sorted(plain[0]) == sorted(plain[1])
    ):
        return None
    return plain[0].casefold() == plain[1].casefold()


def time_of_day(text: str) -> tuple[int, int, str] | None:
    """Returns hours, minutes and am or pm, or an empty text, of a time such as 3:30; None for any other text."""
    found = _TIME.fullmatch(words(text))
    return (int(found[1]), int(found[2]), found[3] or "") if found else None


def same_time(one: str, other: str) -> bool:
    """Returns whether both are the same time; one of them may leave out am or pm."""
    mine, theirs = time_of_day(one), time_of_day(other)
    return mine is not None and theirs is not None and mine[:2] == theirs[:2] and {mine[2], theirs[2]} != {"am", "pm"}


_CHOSEN = re.compile(
    rf"(?:{_WORDS_IN}\s*\(?(?P<letter>[A-J])[.:)][\s~]*\}}|\(?(?P<bare>[A-J])[.:)](?=\s))"
    r"(?:[\s~$]|\\[,;:! ])*(?P<value>[^\s,;](?:.*\S)?)\s*"
)


def choice(text: str) -> tuple[str, str] | None:
    """Returns letter and value of a choice that has both, such as \\textbf{(D)} 24; None for any other text."""
    whole = _WRAPPED.fullmatch(text.strip())
    found = _CHOSEN.fullmatch(whole[1].strip() if whole else text.strip())
    if not found or re.search(r"[A-J][.:)]|\b(?:and|or)\b", found["value"]):
        return None
    return found["letter"] or found["bare"], found["value"]


_NAMED = re.compile(r"[\s$]*([A-Za-z])\s*=([^=<>]+)")
_SPLIT = re.compile(r"[,;]|\\text\s*\{[\s,]*and\s*\}|(?<![A-Za-z\\])and(?![A-Za-z])")


def named(text: str) -> dict[str, str]:
    """Returns the values that an answer such as x=2, y=3 gives to several names; empty if it is no such answer."""
    parts = [_NAMED.fullmatch(part) for part in _SPLIT.split(text)]
    values = {part[1]: part[2].strip(" $") for part in parts if part}
    return values if len(values) == len(parts) > 1 else {}
