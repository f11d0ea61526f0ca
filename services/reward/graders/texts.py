"""Brings texts to one form: Unicode's forms of a character, and the parts of an answer that do not matter."""

import re
import unicodedata

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
    found = _unwrap(plain)
    found = _ARTICLE.sub("", found.casefold())
    found = _DIGITS.sub(lambda run: run[0].replace(",", "") if _THOUSANDS.fullmatch(run[0]) else run[0], found)
    marks = _kept(found)
    found = "".join(
        character
        for index, character in enumerate(found)
        if index in marks or not unicodedata.category(character).startswith("P")
    )
    found = re.sub(r"(?<=\d) (?=%)", "", " ".join(found.split()))
    return found or plain.casefold()


def _unwrap(text: str) -> str:
    """Returns the text without emphasis, quotes, and brackets or `$` around all of it."""
    text = _WRAPPED.sub(r"\2", text)
    for opening, closing in ("()", "[]", "{}", "$$"):
        inside = text[1:-1].strip()
        is_wrapped = text[:1] == opening and text[-1:] == closing and len(text) > 2 and inside
        if is_wrapped and not any(mark in inside for mark in "()[]{}$,;"):
            return inside
    return text


_MEANT = (
    r"(?<=\d)[^\w\s]+(?=\d)",  # 3.5, 1/2, 3-5, 3:45, 2^3
    r"(?<![\w.])\.(?=\d)",  # .5
    r"(?:(?<=^)|(?<=[\s(\[,;=<>$]))-(?=[\w.$])",  # -5, -x
    r"(?<=[\d)])(?:\s?%|[!*'\"]+)",  # 50%, 5!, 5'
    rf"{_VARIABLE}[-/*!^](?!\w\w)|(?<=\d)[-/*](?={_VARIABLE})",  # x-1, n!, 5-x
    r"(?<=\w)[#*@&_\\](?![*_])|[&@](?=\s|$)|(?<=\w)[&@_](?=\w)",  # C#, A*, R & B, snake_case
)
_KEPT = [re.compile(pattern) for pattern in _MEANT]


def _kept(text: str) -> set[int]:
    """Returns the indices of punctuation that is part of an answer."""
    found = {index for pattern in _KEPT for match in pattern.finditer(text) for index in range(*match.span())}
    groups = [match for match in _GROUP.finditer(text) if re.search(r"\d", match[0]) and re.search("[,;]", match[0])]
    found |= {index for match in groups for index in range(*match.span()) if not text[index].isspace()}
    if re.search(rf"(?:\d\s?|{_VARIABLE})[(\[{{]|[)\]}}]\s?[\d(\[{{]", text):  # a product or a function: 2(3+4), f(2)
        found |= {index for index, character in enumerate(text) if character in "()[]{}"}
    return found
