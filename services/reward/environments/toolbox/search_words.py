"""Splits documents and queries into the words that are compared, in any script.

Scripts that put no space between words (Chinese, Japanese, Thai and others) and Korean, which adds particles to words,
are split into single characters and pairs of neighbors, as Lucene does: "東京都" is 東, 京, 都, 東京 and 京都.
"""

import re
import unicodedata
from itertools import pairwise

VERSION = f"words-1-{unicodedata.unidata_version}"
"""Text that changes whenever a text could get other words."""
# Without "a", which is a name as other letters are: vitamin A.
_ENGLISH = """an and are as at be but by for if in into is it no not of on or such that the their then there these they
this to was will with"""
_STOP_WORDS = frozenset(_ENGLISH.split())
_DENSE = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\ua9e0-\ua9ff\uaa60-\uaa7f\u1780-\u17ff"  # Thai, Lao, Myanmar, Khmer
    "\u1950-\u19df\u1a20-\u1aaf\uaa80-\uaadf\u1b00-\u1b7f\ua980-\ua9df"  # Tai scripts, Balinese, Javanese
    "\u1100-\u11ff\u3130-\u318f\ua960-\ua97f\uac00-\ud7ff"  # Hangul
    "\u3005-\u3007\u3021-\u3029\u3040-\u30ff\u3100-\u312f\u31a0-\u31bf\u31f0-\u31ff\U0001b000-\U0001b16f"  # kana
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff\ua000-\ua4cf]"  # Han, Yi
)
# Soft hyphens, joiners and marks of direction, which are not seen.
_UNSEEN = re.compile("[\u00ad\u200c-\u200f\u202a-\u202e\u2060\ufeff]")
_NAME_END = r"(?:(?:\+\+?|#)(?![\w+#]))?"
_ASCII_WORD = re.compile(rf"\w+{_NAME_END}")
# These match the kinds of the characters in place of the characters.
_CHARACTER = re.compile("dm*")
_WORD = re.compile(rf"(?P<dense>(?:dm*)+)|[wm]+{_NAME_END}")


class _Kinds(dict[int, str]):
    """Maps a character to its kind: d of a dense script, w of another word, m a mark on the one before; else itself.

    Python's regular expressions count the marks of Indic and other scripts as no part of a word.
    """

    def __missing__(self, code: int) -> str:
        character = chr(code)
        if unicodedata.category(character).startswith("M"):
            kind = "m"
        elif character.isalnum() or character == "_":
            kind = "d" if _DENSE.match(character) else "w"
        else:
            kind = character if character in "+#" else " "
        self[code] = kind
        return kind


_KINDS = _Kinds()


def words(text: str) -> list[str]:
    """Returns the words of a text in their order, with repetitions. Case, width and composition do not count.

    Names such as C++, C# and F# are a word beside that of their letter.
    """
    if text.isascii():
        return _named(_ASCII_WORD.findall(text.lower()))
    text = unicodedata.normalize("NFKC", _UNSEEN.sub("", text)).casefold()
    text = unicodedata.normalize("NFKC", text)
    kinds = text.translate(_KINDS)
    found: list[str] = []
    for word in _WORD.finditer(kinds):
        begin, end = word.span()
        if word["dense"]:
            characters = [text[slice(*one.span())] for one in _CHARACTER.finditer(kinds, begin, end)]
            found += characters
            found += map("".join, pairwise(characters))
        else:
            found += _named([text[begin:end]])
    return found


def _named(found: list[str]) -> list[str]:
    result = []
    for word in found:
        letters = word.rstrip("+#")
        if letters not in _STOP_WORDS:
            result.append(letters)
        if letters != word:
            result.append(word)
    return result
