"""Says what is certain of the tokens of a text before it is encoded, for byte-level BPE, which most models have.

Its tokens are bytes of the text, all of them. Encoding some megabytes takes a minute and a gigabyte.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

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
