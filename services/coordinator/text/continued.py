"""Encodes a text as the continuation of another one, whose tokens stay as they are.

Tokenizers of sentencepiece's kind put a space before a text. Where it stands behind other text, they put none, or only
behind an added token.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress

from services.common.errors import InvalidInput
from services.coordinator.text.tokenizer import Tokenizer

_TAIL = 100
"""Characters of the text before that are encoded with the text: more than an added token has."""
# Texts to encode before a text that has a token in common with the end of the one before it: hardly a vocabulary joins
# both of them to a letter.
_NEUTRAL = ("\n", ".")


def encode_continued(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
    """Returns the token ids of the second text of each pair as it stands behind the first, on all cores.

    Raises:
        InvalidInput: See Tokenizer.encode.
    """
    texts = [text for _, text in pairs]
    if not texts or not _puts_space(tokenizer):
        return tokenizer.encode_batch(texts)
    tails = [before[-_TAIL:] for before, _ in pairs]
    heads = tokenizer.encode_batch(tails)
    wholes = tokenizer.encode_batch([tail + text for tail, text in zip(tails, texts, strict=True)])
    rests = map(_tokens_after, heads, wholes)
    return [
        encode_after(tokenizer.encode, _NEUTRAL, text) if rest is None else rest
        for text, rest in zip(texts, rests, strict=True)
    ]


def encode_marked_continued(tokenizer: Tokenizer, before: str, text: str) -> list[int]:
    """Returns the token ids of a text with parts that Tokenizer.as_text made, as it stands behind `before`.

    Raises:
        InvalidInput: See Tokenizer.encode.
    """
    befores = (before[-_TAIL:], *_NEUTRAL) if _puts_space(tokenizer) else ()
    return encode_after(tokenizer.encode_marked, befores, text)


def encode_after(encode: Callable[[str], list[int]], befores: Sequence[str], text: str) -> list[int]:
    """Returns the tokens of `text` behind the first of `befores` that has no token in common with it; else alone."""
    for before in befores:
        with suppress(InvalidInput):  # the vocabulary may lack this one
            rest = _tokens_after(encode(before), encode(before + text))
            if rest is not None:
                return rest
    return encode(text)


def _puts_space(tokenizer: Tokenizer) -> bool:
    """Returns whether a text alone has other tokens than behind other text."""
    try:
        alone = tokenizer.encode("a")
    except InvalidInput:  # a vocabulary without letters
        return False
    return any(encode_after(tokenizer.encode, [before], "a") != alone for before in _NEUTRAL)


def _tokens_after(head: list[int], whole: list[int]) -> list[int] | None:
    """Returns the tokens of a text behind another, whose tokens are `head`; None if a token is of both."""
    return whole[len(head) :] if head and whole[: len(head)] == head else None
