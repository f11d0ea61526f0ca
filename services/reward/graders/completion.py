"""Finds what a completion gives as its answer: what follows the reasoning, and the fenced blocks in it."""

import re
import textwrap
from collections.abc import Iterator

_FENCE = re.compile(r"^([ \t]*)(`{3,}(?=[^`\n]*$)|~{3,})([^\n]*)$", re.MULTILINE)
"""Matches a line that opens or closes a block; the groups are its indentation, its marks and what follows them."""
_TOKEN = re.compile(
    r"""\#[^\n]*|(\"{3}|'{3})(?:\\.|(?!\1).)*(?:\1|\Z)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?""", re.DOTALL
)
"""Matches a comment or a string of Python; group 1 is the quotes of one of several lines. Takes linear time."""
_LANGUAGE = re.compile(r"\s*\{?\s*\.?([\w+#-]*)")
_THINK, _THOUGHT = "<think>", "</think>"


def after_reasoning(completion: str) -> str:
    """Returns what follows the first `</think>`, or the whole completion if it has none.

    A `</think>` within a line of a block of code is part of that code.
    """
    head, closed, rest = completion.partition(_THOUGHT)
    if not closed:
        return completion
    is_alone = not head.rpartition("\n")[2].strip() and not rest.partition("\n")[0].strip()
    in_code = sum(1 for _ in _FENCE.finditer(head)) % 2 == 1 and not is_alone and _THINK not in head
    return completion if in_code else rest


def unindent(program: str) -> str:
    """Returns the program without the indentation that all its lines have, as in a list of Markdown."""
    return textwrap.dedent(program) if re.match(r"\s*\n?[ \t]+\S", program) else program


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yields language and content of each fenced block, as CommonMark finds them, with three exceptions.

    A fence in a string of the program, such as an example in a docstring, closes nothing. A fence with a language
    closes an unclosed block. A fence at the end of the last line of the text closes too.
    """
    end = 0
    while opened := _FENCE.search(text, end):
        start = min(opened.end() + 1, len(text))
        language = _LANGUAGE.match(opened[3].lower())
        stop, end = _closing(text, opened, start)
        content = text[start:stop]
        if stop == len(text):
            content = re.sub(r"(?<=\S)[ \t]*(?:`{3,}|~{3,})\s*\Z", "\n", content)
        yield language[1] if language else "", content


def _closing(text: str, opened: re.Match, start: int) -> tuple[int, int]:
    """Returns where the content of the block ends, and where the search for the next block begins."""
    fallback = (len(text), len(text))
    strings = (token for token in _TOKEN.finditer(text, start) if token[1])
    string = next(strings, None)
    for fence in _FENCE.finditer(text, start):
        while string and string.end() <= fence.start():
            string = next(strings, None)
        if string and string.start() < fence.start() and _has_example(string):
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
