"""Encodes text whose author must not write special tokens, such as a web page that an environment shows.

A tokenizer turns `<|im_end|>` into the token that ends a turn, no matter who wrote it. An environment's text is
therefore marked before it is rendered: each added token that is spelled in it, special or not, becomes one character
that nothing else contains, and chat templates pass this on like any letter. Added tokens in the rendered text are then
the template's own.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np
import tokenizers

from services.common.json_values import JsonObject

# The bytes that a vocabulary has as they are in Latin-1. The others are the characters from 256 on.
_AS_THEY_ARE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _AS_THEY_ARE]
BYTE_OF = {chr(byte): byte for byte in _AS_THEY_ARE} | {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}
"""The byte that each character of a vocabulary stands for."""
_ASCII = frozenset(map(chr, range(33, 127)))
# The only characters that NFC may change, or join.
_MAY_CHANGE = re.compile(r"[\x00-\x7f]?[^\x00-\x7f]+")
_SPACES = [*{byte for code in range(0x3001) if chr(code).isspace() for byte in chr(code).encode()}]


@dataclass(frozen=True)
class ByteLevel:
    """Says what is certain of the tokens of a text before it is encoded, for byte-level BPE, which most models have.

    Its tokens are bytes of the text, all of them. Encoding some megabytes takes a minute and a gigabyte.
    """

    normalizer: tokenizers.normalizers.Normalizer | None
    """None, or one that does NFC and nothing else."""
    tokens_per_byte: np.ndarray
    """1 / the length of the longest token with this byte, float64 [256]: at most 1 for all bytes of a token."""
    spells_added: bool
    """Whether a text has an added token only where its normalized form spells it."""

    def fewest_tokens(self, text: str) -> int:
        """Returns a number of tokens that `text` has at least."""
        if self.normalizer and not text.isascii():
            text = _MAY_CHANGE.sub("", text)
        counts = np.bincount(np.frombuffer(text.encode(errors="replace"), np.uint8), minlength=256)
        return int(counts @ self.tokens_per_byte * (1 - 1e-9))  # rounding must not add one

    def normalized(self, text: str) -> str:
        return self.normalizer.normalize_str(text) if self.normalizer and not text.isascii() else text


def byte_level(backend: tokenizers.Tokenizer) -> ByteLevel | None:
    """Returns None if the tokenizer is of another kind, and could leave out or replace parts of a text."""
    content, added = json.loads(backend.to_str()), backend.get_added_tokens_decoder()
    texts, vocab = {token.content for token in added.values()}, content["model"]["vocab"]
    if not _keeps_bytes(content) or not BYTE_OF.keys() <= vocab.keys():
        return None
    normalizer = backend.normalizer if content["normalizer"] else None
    if normalizer and any(normalizer.normalize_str(text) != text for text in texts):
        return None
    words = [word for word in vocab if {*word} <= BYTE_OF.keys()]
    longest = _longest((*(bytes(BYTE_OF[one] for one in word) for word in words), *(text.encode() for text in texts)))
    tokens_per_byte = 1 / np.array(longest)
    if any(token.lstrip or token.rstrip for token in added.values()):
        tokens_per_byte[_SPACES] = 0  # such a token takes in all white space beside it
    spells_added = all(word in texts and {*word} <= _ASCII for word in words if vocab[word] in added)
    return ByteLevel(normalizer, tokens_per_byte, spells_added)


def _keeps_bytes(content: JsonObject) -> bool:
    model, normalizers = content["model"], _steps(content["normalizer"], "normalizers")
    *splits, last = _steps(content["pre_tokenizer"], "pretokenizers") or [{"type": ""}]
    changes = ("byte_fallback", "continuing_subword_prefix", "end_of_word_suffix")
    return (
        (model["type"], last["type"]) == ("BPE", "ByteLevel")
        and not any(model.get(name) for name in changes)
        and all(step["type"] == "NFC" for step in normalizers)
        and all(step["type"] in ("Split", "Digits") and step.get("behavior") != "Removed" for step in splits)
    )


def _steps(content: JsonObject | None, name: str) -> list[JsonObject]:
    """Returns the steps of a sequence, of which `name` is the key, and of those in it; or the only step."""
    if content is None:
        return []
    return [inner for step in content[name] for inner in _steps(step, name)] if name in content else [content]


def _longest(words: Iterable[bytes]) -> list[int]:
    """Returns the length of the longest word with each byte."""
    longest = [1] * 256
    for word in words:
        for byte in {*word}:
            longest[byte] = max(longest[byte], len(word))
    return longest


_FIRST_MARK = 0xF0000
"""First character of a plane of Unicode that is for private use."""
_HIDDEN = chr(0x100000)
"""Mark before a text that becomes a token only once the tokenizer has normalized it. It stands for no text."""


@contextmanager
def encoding() -> Iterator[None]:
    """Raises ValueError if the tokenizer cannot encode a text in the block.

    tokenizers raises no narrower class than Exception, and its panics, as of a regular expression that takes too many
    steps for a long text, are none.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(str(error)) from error


class PlainText:
    """Marks added tokens that are spelled in a text, and encodes rendered text with marks.

    Added tokens of white space only, such as runs of spaces, command nothing and are left out of all this.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend
        added = {id: token for id, token in backend.get_added_tokens_decoder().items() if token.content.strip(" ▁\t\n")}
        # A tokenizer finds the longest of the tokens that begin at the same place.
        tokens = sorted(added.values(), key=lambda token: len(token.content), reverse=True)
        self._ids, self._special = set(added), {token.content: token for token in tokens}
        self._mark_of = {text: chr(_FIRST_MARK + number) for number, text in enumerate(self._special)}
        self._text_of = {mark: text for text, mark in self._mark_of.items()} | {_HIDDEN: ""}
        self._spelled = _pattern_of(self._special)
        self._marked = _pattern_of(self._text_of)

    def mark(self, text: str, only: Collection[str] | None = None) -> str:
        """Returns `text` without added tokens, or without `only` some. Characters that are marks become U+FFFD."""
        text = self._marked.sub("\ufffd", text)
        if only is not None:
            return self._spelled.sub(lambda match: self._mark_of[match[0]] if match[0] in only else match[0], text)
        parts, begin = [], 0
        for match in self._spelled.finditer(text):
            parts += [self._hide(text[begin : match.start()]), self._mark_of[match[0]]]
            begin = match.end()
        return "".join([*parts, self._hide(text[begin:])])

    def unmark(self, text: str) -> str:
        return self._marked.sub(lambda match: self._text_of[match[0]], text)

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text with marks. Without marks, they are those that the tokenizer gives.

        Text between two added tokens is encoded alone by any tokenizer. So a part that has marks can be encoded apart
        from the others, and as text.
        """
        if not self._marked.search(text):
            return _encode(self._backend, text)
        tokens: list[int] = []
        for has_marks, parts in groupby(self._split_at_tokens(text), lambda part: bool(self._marked.search(part))):
            if has_marks:
                tokens += (token for part in parts for token in self._as_text(part))
            else:
                tokens += _encode(self._backend, "".join(parts))
        return tokens

    def fewest_tokens(self, text: str) -> int:
        """Returns a number of tokens that a text with marks has at least, without encoding it."""
        return self._byte_level.fewest_tokens(self.unmark(text)) if self._byte_level else 0

    def _hide(self, text: str) -> str:
        """Marks the places of a text without spelled tokens that the tokenizer takes for one, after normalizing it."""
        known = self._byte_level
        try:
            with encoding():
                if known and known.spells_added and not self._spelled.search(known.normalized(text)):
                    return text
                encoded = self._backend.encode(text, add_special_tokens=False)
        except ValueError:  # which `encode` will raise again
            return text
        starts = {
            begin
            for token, (begin, _) in zip(encoded.ids, encoded.offsets, strict=True)
            if token in self._ids and token != self._unknown
        }
        for begin in sorted(starts, reverse=True):  # from the end, so that earlier places stay right
            text = text[:begin] + _HIDDEN + text[begin:]
        return text

    def _as_text(self, part: str) -> list[int]:
        """Encodes a part with marks. A spelled token that is no text to the tokenizer is encoded by characters."""
        try:
            tokens = _encode(self._without_added, self.unmark(part))
        except ValueError:
            tokens = []
        if tokens and self._unknown not in tokens:
            return tokens
        texts: list[str] = []
        for index, piece in enumerate(re.split(f"({self._marked.pattern})", part)):
            texts += list(self.unmark(piece)) if index % 2 else [piece]  # every second piece is a mark
        return [token for text in texts for token in _encode(self._without_added, text)]

    def _split_at_tokens(self, text: str) -> Sequence[str]:
        """Splits a text into added tokens, with the white space that they take, and the text between them."""
        parts, begin = [], 0
        for match in self._spelled.finditer(text):
            token = self._special[match[0]]
            before, after = text[begin : match.start()], text[match.end() :]
            left = len(before.rstrip()) if token.lstrip else len(before)
            right = match.end() + (len(after) - len(after.lstrip()) if token.rstrip else 0)
            parts += [before[:left], text[begin + left : right]]
            begin = right
        return [*parts, text[begin:]]

    @cached_property
    def _byte_level(self) -> ByteLevel | None:
        return byte_level(self._backend)

    @cached_property
    def _unknown(self) -> int | None:
        """Returns the token of text that the vocabulary cannot spell, if there is one."""
        model = json.loads(self._backend.to_str())["model"]
        word = model.get("unk_token")
        return model.get("unk_id") if word is None else self._backend.token_to_id(word)

    @cached_property
    def _without_added(self) -> tokenizers.Tokenizer:
        """Returns a copy of the tokenizer in which the added tokens are words that no text spells.

        The vocabulary may hold the same words, which its model would find in text without any added tokens.
        """
        content = json.loads(self._backend.to_str()) | {"post_processor": None}
        # One character is a letter of the alphabet, which the model needs for other words.
        spelled = {text for text in self._special if len(text) > 1}
        rename = {text: f"{_HIDDEN}{number}" for number, text in enumerate(spelled)}
        for token in content["added_tokens"]:
            token["content"] = rename.get(token["content"], token["content"])
        _rename_words(content["model"], rename)
        return tokenizers.Tokenizer.from_str(json.dumps(content))


def _rename_words(model: JsonObject, rename: Mapping[str, str]) -> None:
    """Renames words of a model's vocabulary, which keep their ids, and removes the merges that make them."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {rename.get(word, word): id for word, id in vocab.items()}
    else:
        model["vocab"] = [[rename.get(word, word), score] for word, score in vocab]
    if model.get("unk_token") is not None:
        model["unk_token"] = rename.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & rename.keys()]


def _encode(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    with encoding():
        return backend.encode(text, add_special_tokens=False).ids


def _pattern_of(texts: Collection[str]) -> re.Pattern[str]:
    """Returns a pattern that finds any of `texts`, the earlier ones first; one that finds nothing if there are none."""
    if not texts:
        return re.compile(r"(?!)")
    firsts = "".join(sorted({re.escape(text[0]) for text in texts}))
    return re.compile(f"(?=[{firsts}])(?:{'|'.join(map(re.escape, texts))})")
