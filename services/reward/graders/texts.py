"""Reads texts of models and datasets: what follows the reasoning, fenced blocks, scores and formats, and one form of
answers that differ only in what does not matter."""

import re
import textwrap
import unicodedata
from collections.abc import Iterator

from services.common.tool_syntax import OTHER_REASONING_TAGS, THINK
from services.reward.errors import FailureReason, ScoringError

_FULL_WIDTH = {0xFEE0 + code: code for code in range(0x21, 0x7F)} | {0x3000: 0x20}
_FULL_WIDTH |= {0x1D7CE + index: 0x30 + index % 10 for index in range(50)}  # bold digits and the like
_SIGNS = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2212\ufe63"), "-") | {0xFE62: "+", 0x2044: "/", 0x2215: "/"}
_QUOTES = dict.fromkeys(map(ord, "\u2018\u2019"), "'") | dict.fromkeys(map(ord, "\u201c\u201d"), '"')
_DIGITS = re.compile(r"(?<![\w.,])\d[\d,]*")
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+,?")
_WRAPPED = re.compile(r"""(\*{1,3}|_{1,3}|`{1,3}|")(?=\S)((?:(?!\1).)+)(?<=\S)\1""", re.DOTALL)
_ARTICLE = re.compile(r"(?<![\w'])(?:a(?=\s+\w\w)|(?:an|the)(?=\s+[^\w\s]*\w))\s+(?!(?:a|an|the|and|or|nor|vs|is)\b)")
_GROUP = re.compile(r"[(\[][^()\[\]]*[)\]]")
_VARIABLE = r"(?<![^\W\d_])[^\W\d_](?![^\W\d_])"
_OPERAND = rf"\s?(?:\d|\(|{_VARIABLE}|\w+\((?!e?s\)))"  # and no plural: singer(s)


def one_width(text: str) -> str:
    """Returns the text with ASCII characters in place of full-width ones, and plain signs.

    Other compatibility forms stay: a superscript or a fraction is not the digit that Unicode maps it to.
    """
    return text.translate(_FULL_WIDTH | _SIGNS)


def with_fractions(text: str) -> str:
    """Returns the text in one width, with \\frac{1}{2} in place of the character for one half, and so on."""
    text = one_width(text)
    for character in set(text):
        kind, *parts = unicodedata.decomposition(character).split() or [""]
        if kind == "<fraction>" and len(parts) >= 3:
            above, _, below = "".join(chr(int(part, 16)) for part in parts).partition("\u2044")
            text = text.replace(character, f"\\frac{{{above}}}{{{below}}}")
    return text


def normalize(text: str) -> str:
    """Returns the text without what is not the answer: case, white space, an article before a word, quotes, emphasis,
    and the punctuation of sentences, as SQuAD does (arXiv 1606.05250).

    What distinguishes answers stays: signs, points and other marks at numbers (-5, 3.5, 1/2, 50%, 5!), symbols (C++,
    $5, x = 1), brackets of a pair or a product, and an article that is all there is or stands at the end (A, Plan A). A
    text with any visible character never becomes empty.
    """
    plain = unicodedata.normalize("NFC", one_width(text)).translate(_QUOTES)
    plain = " ".join(plain.split())
    visible = "".join(character for character in plain if unicodedata.category(character) != "Cf") or plain
    answer = _ARTICLE.sub("", _unwrap(" ".join(visible.split())).casefold())
    answer = _DIGITS.sub(lambda run: run[0].replace(",", "") if _THOUSANDS.fullmatch(run[0]) else run[0], answer)
    answer = re.sub(r" ?= ?", "=", answer.replace(" \u00b0", "\u00b0"))
    answer = re.sub(r"(?:^|(?<=[(\[,;=<>])|(?<=[(\[,;=<>] ))- (?=[\d.$€£¥])", "-", answer)  # the sign of a number
    answer = re.sub(r"(?<=[^\W_]),(?=[^\W_]|-)", ", ", answer)  # a list with and without spaces
    marks = _meaningful_marks(answer)
    answer = "".join(
        character
        for index, character in enumerate(answer)
        if index in marks or not unicodedata.category(character).startswith("P")
    )
    answer = re.sub(r"(?<=\d) (?=%)", "", " ".join(answer.split()))
    return answer or plain.casefold()


def _unwrap(text: str) -> str:
    """Returns the text without emphasis, quotes, and brackets or `$` around all of it."""
    text = _WRAPPED.sub(r"\2", text)
    for opening, closing in ("()", "[]", "{}", "$$"):
        content = text[1:-1].strip()
        is_wrapped = text[:1] == opening and text[-1:] == closing and len(text) > 2 and content
        if is_wrapped and not any(mark in content for mark in "()[]{}$,;"):
            return content
    return text


_MEANINGFUL = (
    r"(?<=\d)[^\w\s]+(?=\d)",  # 3.5, 1/2, 3-5, 3:45, 2^3
    r"(?<![\w.])\.(?=\d)",  # .5
    r"(?:(?<=^)|(?<=[\s(\[,;=<>$]))-(?=[\w.$(\u221a\u221e\u20ac\u00a3\u00a5])",  # -5, -x, -(x+1)
    r"(?<=[\d)])(?:\s?%|[!*'\"]+)",  # 50%, 5!, 5'
    rf"{_VARIABLE}(?:[-/*!^](?!\w\w)|[/*^](?=\d))|(?<=\d)[-/*](?={_VARIABLE})",  # x-1, n!, x/10, 5-x
    rf"(?<=[\w)]\))\s?[-*/^](?={_OPERAND})",  # sin(x)/2, sin(x)-cos(x)
    rf"(?:(?<=[\d)])|{_VARIABLE})\s?[-*/^](?=\s?\()",  # 2/(x+1)
    r"(?<=\w)[#*@&_\\](?![*_])|[&@](?=\s|$)|(?<=\w)[&@_](?=\w)",  # C#, A*, R & B, snake_case
)
_FORMULA = rf"[^()+*/^=<>-]*(?:[+*/^=<>]|-\s?(?:\d|{_VARIABLE}))"
_APPLIED = (  # brackets that are part of a formula
    rf"(?:\d\s?|{_VARIABLE})[(\[{{]|[)\]}}]\s?[\d(\[{{]"  # 2(3+4), f(2)
    rf"|[^\W\d_]\((?:[^()]*\)\s?(?:[+*^=<>]|[-/](?={_OPERAND}))|{_FORMULA})"  # sin(x)+1, log(x+1)
    rf"|\((?!\d+-\d+\)){_FORMULA}[^()]*\)\s?(?:[+*^!]|[-/](?={_OPERAND}))|[-+*/^]\s?\({_FORMULA}"  # (x+1)/2, 2/(x+1)
)


def _meaningful_marks(text: str) -> set[int]:
    """Returns the indices of punctuation that is part of an answer."""
    marks = {index for pattern in _MEANINGFUL for match in re.finditer(pattern, text) for index in range(*match.span())}
    groups = [match for match in _GROUP.finditer(text) if re.search(r"\d", match[0]) and re.search("[,;]", match[0])]
    marks |= {index for match in groups for index in range(*match.span()) if not text[index].isspace()}
    if re.search(_APPLIED, text):
        marks |= {index for index, character in enumerate(text) if character in "()[]{}"}
    return marks


_FENCE = re.compile(r"^([ \t]*)(`{3,}(?=[^`\n]*$)|~{3,})([^\n]*)$", re.MULTILINE)
"""Matches a line that opens or closes a block; the groups are its indentation, its marks and what follows them."""
_TOKEN = re.compile(
    r"""\#[^\n]*|(\"{3}|'{3})(?:\\.|(?!\1).)*(?:\1|\Z)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?""", re.DOTALL
)
"""Matches a comment or a string of Python; group 1 is the quotes of one of several lines. Takes linear time."""
_LANGUAGE = re.compile(r"\s*\{?\s*\.?([\w+#-]*)")
_TAGS = (THINK, *OTHER_REASONING_TAGS)
_THOUGHT = re.compile("|".join(re.escape(closing) for _, closing in _TAGS))


def after_reasoning(completion: str) -> str:
    """Returns what follows the first `</think>`, or another model's tag like it; the whole completion if it has none.

    A tag within a line of a block of code is part of that code.
    """
    if not (closed := _THOUGHT.search(completion)):
        return completion
    closing = next((pair[1] for pair in _TAGS if pair[0] in completion[: closed.start()]), closed[0])
    head, tag, rest = completion.partition(closing)
    is_alone = not head.rpartition("\n")[2].strip() and not rest.partition("\n")[0].strip()
    is_opened = any(opening in head for opening, _ in _TAGS)
    in_code = sum(1 for _ in _FENCE.finditer(head)) % 2 == 1 and not is_alone and not is_opened
    return completion if in_code or not tag else rest


def last_tagged(text: str) -> str | None:
    """Returns what the last <answer> has up to its </answer>; None if there is none or it is not closed."""
    _, opened, rest = text.rpartition("<answer>")
    tagged, closed, _ = rest.partition("</answer>")
    return tagged if opened and closed else None


def unindent(program: str) -> str:
    """Returns the program without the indentation that all its lines have, as in a list of Markdown."""
    space = program[: len(program) - len(program.lstrip())]
    return textwrap.dedent(program) if space.endswith((" ", "\t")) else program


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yields language and content of each fenced block, as CommonMark finds them, with three exceptions.

    A fence in a string of the program, such as an example in a docstring, closes nothing. A fence with a language
    closes an unclosed block. A fence at the end of the last line of the text closes too.
    """
    end, tokens = 0, _Tokens(text)
    while opened := _FENCE.search(text, end):
        start = min(opened.end() + 1, len(text))
        language = _LANGUAGE.match(opened[3].lower())
        stop, end = _closing(text, opened, start, tokens)
        content = text[start:stop]
        yield language[1] if language else "", _without_fence(content) if stop == len(text) else content


def _without_fence(content: str) -> str:
    """Returns the content without a fence at the end of its last line."""
    text = content.rstrip()
    for mark in "`~":
        body = text.rstrip(mark)
        line = body.rstrip(" \t")
        if len(text) - len(body) >= 3 and line and not line[-1].isspace():
            return f"{line}\n"
    return content


class _Tokens:
    """Finds strings and comments of one block after the other, and reads no part of the text for each block again."""

    def __init__(self, text: str):
        self._text = text
        self._search(0)

    def _search(self, start: int) -> None:
        self._from, self._next = start, _TOKEN.search(self._text, start)

    def begin(self, start: int) -> None:
        """Begins a block at `start`, whatever string was open before it."""
        if start < self._from or (self._next and self._next.start() < start):
            self._search(start)

    def around(self, place: int) -> re.Match | None:
        """Returns what `place` is within; places of a block must not fall."""
        while self._next and self._next.end() <= place:
            self._search(self._next.end())
        return self._next if self._next and self._next.start() < place else None


def _closing(text: str, opened: re.Match, start: int, tokens: _Tokens) -> tuple[int, int]:
    """Returns where the content of the block ends, and where the search for the next block begins."""
    fallback = (len(text), len(text))
    tokens.begin(start)
    for fence in _FENCE.finditer(text, start):
        token = tokens.around(fence.start())
        if token and token[1] and _has_example(token):
            continue
        if fence[2][0] != opened[2][0] or len(fence[2]) < len(opened[2]):
            continue
        is_far = len(fence[1].expandtabs(4)) > len(opened[1].expandtabs(4)) + 3
        if fence[3].strip():
            if not is_far:
                return fence.start(), fence.start()
        elif not is_far:
            return fence.start(), fence.end()
        elif fallback[0] == len(text):
            fallback = fence.start(), fence.end()
    return fallback


def _has_example(string: re.Match) -> bool:
    """Returns whether the fences in a string are its own. If the last one opens a block, the string is not a string: it
    was not closed in its block, and its end belongs to the next block."""
    fences = _FENCE.findall(string[0])
    return string[0].endswith(string[1]) and len(string[0]) >= 6 and bool(fences) and not fences[-1][2].strip()


def match_format(*, completion: str, pattern: str, **_: object) -> float:
    """Returns 1.0 if `pattern` matches the whole `completion`, else 0.0. `.` matches line breaks too."""
    return float(re.fullmatch(pattern, completion, re.DOTALL) is not None)


def extract_score(*, text: str, pattern: str) -> float:
    """Returns the first group of the last match of `pattern` in `text`, as a number. `.` matches line breaks too.

    A part of a number is no score: `(\\d)` would read 1 in 10, `(\\d+)` 7 in 7.5, in -7 and in 7,5, `.*(\\d+)` 0 in 10.
    """
    # The last match counts, because a judge reasons and quotes before it gives its verdict.
    last = max(re.finditer(pattern, text, re.DOTALL), key=re.Match.start, default=None)
    if last is None:
        raise ScoringError(FailureReason.ERROR, f"score_pattern does not match the judge's answer {text[-200:]!r}")
    try:
        score = float(last[1])
    except (TypeError, ValueError):
        raise ScoringError(FailureReason.ERROR, f"the judge's score {last[1]!r} is not a number") from None
    if _is_part(text, *last.span(1), pattern):
        detail = f"score_pattern takes only {last[1]!r} of a longer number in the judge's answer {text[-200:]!r}"
        raise ScoringError(FailureReason.ERROR, detail)
    return score


def _is_part(text: str, begin: int, end: int, pattern: str) -> bool:
    """Returns whether the digits from `begin` to `end` are only a part of a number.

    A sign or a comma that `pattern` has itself, or a comma in brackets, is left to it: `(\\d+),(\\d+)` reads a list.
    """
    before, after = text[max(begin - 6, 0) : begin], text[end : end + 2]
    if re.match(r"\.?\d", after) or re.search(r"\d\.?\Z", before):
        return True
    if "-" not in pattern and re.search(r"(?:\A|\s)[-−]\Z", before):
        return True
    is_before = re.search(r"(?<![\d.,\[(])\d{1,3},\Z", before)
    is_after = re.match(r",\d", after) and not before.endswith(("[", "("))
    return "," not in pattern and bool(is_before or is_after)
