"""Encodes text whose author must not write special tokens, such as a web page that an environment shows.

A tokenizer turns `<|im_end|>` into the token that ends a turn, no matter who wrote it. An environment's text is
therefore marked before it is rendered: each special token that is spelled in it becomes one character that nothing else
contains, and chat templates pass this on like any letter. Special tokens in the rendered text are then the template's
own.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import tokenizers

_FIRST_MARK = 0xF0000
"""First character of a plane of Unicode that is for private use."""


class PlainText:
    """Marks special tokens that are spelled in a text, and encodes rendered text with marks."""

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend
        special = [token for token in backend.get_added_tokens_decoder().values() if token.special]
        # A tokenizer finds the longest of the tokens that begin at the same place.
        special.sort(key=lambda token: len(token.content), reverse=True)
        self._special = {token.content: token for token in special}
        self._mark_of = {text: chr(_FIRST_MARK + number) for number, text in enumerate(self._special)}
        self._text_of = {mark: text for text, mark in self._mark_of.items()}
        self._spelled = _any_of(self._special)
        self._marked = _any_of(self._text_of)

    def mark(self, text: str) -> str:
        """Returns `text` without special tokens. Characters that are used as marks become U+FFFD."""
        return self._spelled.sub(lambda found: self._mark_of[found[0]], self._marked.sub("\ufffd", text))

    def unmark(self, text: str) -> str:
        """Returns `text` with the special tokens that were spelled in it."""
        return self._marked.sub(lambda found: self._text_of[found[0]], text)

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text with marks. Without marks, they are those that the tokenizer gives.

        Text between two special tokens is encoded alone by any tokenizer. So a stretch that has marks can be encoded
        apart from the others, and as text.
        """
        if not self._marked.search(text):
            return self._encode(self._backend, text)
        tokens: list[int] = []
        for stretch, is_marked in self._stretches(text):
            backend = self._without_special if is_marked else self._backend
            tokens += self._encode(backend, self.unmark(stretch))
        return tokens

    def _stretches(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yields the parts of a text, and whether they are between two special tokens and have marks."""
        plain, parts = "", self._parts(text)
        for part in parts:
            if not self._marked.search(part):
                plain += part
                continue
            if plain:
                yield plain, False
            plain = ""
            yield part, True
        if plain:
            yield plain, False

    def _parts(self, text: str) -> Sequence[str]:
        """Splits a text into special tokens, with the white space that they take, and the text between them."""
        parts, begin = [], 0
        for found in self._spelled.finditer(text):
            token = self._special[found[0]]
            before, after = text[begin : found.start()], text[found.end() :]
            left = len(before.rstrip()) if token.lstrip else len(before)
            right = found.end() + (len(after) - len(after.lstrip()) if token.rstrip else 0)
            parts += [before[:left], text[begin + left : right]]
            begin = right
        return [*parts, text[begin:]]

    @cached_property
    def _without_special(self) -> tokenizers.Tokenizer:
        """Returns a copy of the tokenizer that reads special tokens as text."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend

    @staticmethod
    def _encode(backend: tokenizers.Tokenizer, text: str) -> list[int]:
        return backend.encode(text, add_special_tokens=False).ids


def _any_of(texts: Mapping[str, object]) -> re.Pattern[str]:
    """Returns a pattern that finds any of `texts`, the earlier ones first; one that finds nothing if there are none."""
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")
