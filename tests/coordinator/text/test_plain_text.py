"""Tests that no text of an environment becomes an added token, whatever the tokenizer is made of."""

import re
from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from deploy.quickstart.make_lookup import ROLES
from deploy.quickstart.words import make_tokenizer
from services.common.errors import InvalidInput
from services.coordinator.text.bridge import Bridge
from services.coordinator.text.plain_text import BYTE_OF, PlainText
from services.coordinator.text.tokenizer import Tokenizer, TooManyTokens
from tests.coordinator.text import bridge_families

PRINTABLE = [chr(code) for code in range(32, 127)]
SPECIAL = ["<eos>", "<assistant>", "[END]", "</s>"]
PLAIN = ["<think>", "</think>", "<tool_call>"]
FRAGMENTS = [*SPECIAL, *PLAIN, "<eo", "s>", "<", ">", "42", " ", "\n", "[EN", "D]", "</", "Ａ", "é", "<unk>", "user"]


def words(normalizer: normalizers.Normalizer | None = None) -> tokenizers.Tokenizer:
    """Returns a tokenizer of words and characters, which has all added tokens in its vocabulary too."""
    vocab = {word: id for id, word in enumerate(["<unk>", *SPECIAL, *PLAIN, *PRINTABLE, "\n"])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    if normalizer:
        backend.normalizer = normalizer
    pattern = Regex(r"</?[a-z_]+>|\[[A-Z]+\]|</s>|[\s\S]")
    backend.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="isolated")
    backend.decoder = decoders.Fuse()
    return backend


def unigram() -> tokenizers.Tokenizer:
    """Returns a tokenizer whose model prefers the words of the added tokens, as those of T5 do."""
    pieces = [("<unk>", 0.0), *((word, 0.0) for word in (*SPECIAL, *PLAIN)), *((one, -9.0) for one in PRINTABLE)]
    return tokenizers.Tokenizer(models.Unigram([*pieces, ("\n", -9.0)], 0, byte_fallback=False))


def merged(ignore_merges: bool) -> tokenizers.Tokenizer:
    """Returns a tokenizer whose merges spell an added token, or whose model looks up whole words."""
    vocab = {one: id for id, one in enumerate([*PRINTABLE, "\n", "é", "Ａ", "<unk>", *SPECIAL, *PLAIN])}
    vocab |= {part: len(vocab) + number for number, part in enumerate(["<e", "<eo", "<eos", "42"])}
    merges = [("<", "e"), ("<e", "o"), ("<eo", "s"), ("<eos", ">"), ("4", "2")]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", ignore_merges=ignore_merges))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"<[^<>]*>|\[[A-Z]+\]|\s|[^<>\s]+|."), behavior="isolated")
    return backend


def pieces() -> tokenizers.Tokenizer:
    vocab = {
        one: id for id, one in enumerate([*PRINTABLE, *(f"##{one}" for one in PRINTABLE), "<unk>", "\n", *SPECIAL])
    }
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "words": words,
    "words, NFKC": lambda: words(normalizers.NFKC()),
    "words, lower": lambda: words(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "unigram": unigram,
    "merges": lambda: merged(False),
    "whole words": lambda: merged(True),
    "pieces": pieces,
    "byte-level": lambda: bridge_families._backend("byte-level"),
    "sentencepiece": lambda: bridge_families._backend("sentencepiece"),
}


def with_added(kind: str) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(KINDS[kind]().to_str())
    normalized = "," in kind
    backend.add_special_tokens([AddedToken(text, normalized=normalized) for text in SPECIAL])
    backend.add_tokens([AddedToken(text, normalized=normalized) for text in PLAIN])
    backend.add_tokens([AddedToken("    ")])
    return Tokenizer(backend, None, (1,))


TOKENIZERS = {kind: with_added(kind) for kind in KINDS}
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=8).map("".join)


# Texts that NFC joins or replaces, spelled tokens, and words of the vocabulary.
CHANGING = [
    "e\u0301",
    "\u212a;`",
    "\u1fef",
    "\u037e",
    ">\u0338",
    "\u1100\u1161\u11a8",
    "\u2126\u0314\u0342\u0345",
    " clips",
]
CHANGING += ["K;`", "<|end|>", "  \n\u3000", "漢字", "clips", "x" * 40, " " * 40]


def byte_level_kind(*added: str, nfc: bool) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(bridge_families._backend("byte-level").to_str())
    backend.normalizer = normalizers.Sequence([normalizers.NFC()] if nfc else [])
    backend.add_special_tokens([AddedToken(text, normalized=True) for text in added])
    return backend


BYTE_LEVEL = [
    byte_level_kind(nfc=False),
    byte_level_kind("K;`", nfc=True),
    byte_level_kind("Ġclips", "\u00c3", nfc=True),  # the model makes these of " clips" and of the first byte of "é"
]


@pytest.mark.parametrize("backend", BYTE_LEVEL)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=st.lists(st.sampled_from([*CHANGING, *FRAGMENTS]) | st.text(max_size=3), max_size=12).map("".join))
def test_what_is_certain_before_a_text_is_encoded_is_true(backend: tokenizers.Tokenizer, text: str) -> None:
    known, encoding = PlainText(backend), PlainText(backend)
    encoding.__dict__["_byte_level"] = None  # so that it encodes every text to mark it
    marked = known.mark(text)
    assert marked == encoding.mark(text)
    whole = f"<|user|>{marked}<|end|>{text}"
    assert known.fewest_tokens(whole) <= len(known.encode(whole))


def test_text_is_known_to_be_too_long_before_it_is_encoded() -> None:
    assert {*BYTE_OF} == {*pre_tokenizers.ByteLevel.alphabet()} and sorted(BYTE_OF.values()) == [*range(256)]
    for backend in BYTE_LEVEL:
        tokenizer = Tokenizer(backend, None, (1,))
        text = "the clips\n" * 100 + "é"
        num_tokens = len(tokenizer.encode(text))
        assert num_tokens // 20 < tokenizer._plain_text.fewest_tokens(text)
        assert tokenizer.with_limit(num_tokens).encode_marked(text) == tokenizer.encode(text)
        with pytest.raises(TooManyTokens, match=r"length is 40 tokens, and the prompt alone has \d+ or more"):
            tokenizer.with_limit(40).encode_marked(text)


@pytest.mark.parametrize("backend", BYTE_LEVEL)
def test_half_a_surrogate_pair_is_refused(backend: tokenizers.Tokenizer) -> None:
    """JSON that an agent or the model has written may have one. No normalizer takes it."""
    tokenizer = Tokenizer(backend, None, (1,))
    with pytest.raises(InvalidInput, match="cannot encode"):
        tokenizer.encode_marked(tokenizer.as_text("a\ud800"))


def test_a_text_for_which_the_regular_expression_takes_too_long_is_refused() -> None:
    """The library panics, which is no Exception. So it does of the patterns of some models, for 12 million letters."""
    backend = byte_level_kind("Ġclips", nfc=False)
    pattern = pre_tokenizers.Split(Regex(r"(a+)+$"), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pattern, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer, text = Tokenizer(backend, None, (1,)), "a" * 40 + "b"
    for encode in (tokenizer.encode, tokenizer.encode_marked, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(InvalidInput, match="retry-limit"):
            encode(tokenizer.as_text(text))
        assert encode("ab"), "the tokenizer works on"


def wide(text: str) -> str:
    """Returns `text` in characters that NFKC normalizes to it."""
    return "".join(chr(ord(one) + 0xFEE0) if 32 < ord(one) < 127 else one for one in text)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(first=TEXTS, second=TEXTS, change=st.sampled_from([str, str.upper, wide]))
def test_text_never_becomes_an_added_token(kind: str, first: str, second: str, change: Callable[[str], str]) -> None:
    tokenizer = TOKENIZERS[kind]
    added = tokenizer._backend.get_added_tokens_decoder()
    unknown = tokenizer._backend.token_to_id("<unk>")
    control = {id for id, token in added.items() if token.content.strip() and id != unknown}
    texts = [change(first), change(second)]
    tokens = Bridge(tokenizer).extend([5], [{"role": "", "content": text} for text in texts])
    assert not control & set(tokens), texts
    # Within a template's text, only the template's own are special.
    text = "<assistant>" + tokenizer.as_text(texts[0]) + "<eos>"
    tokens = tokenizer.encode_marked(text)
    assert [token for token in tokens if token in control] == tokenizer.encode("<assistant><eos>")[-2:], texts


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_spelled_is_still_read(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    tokens = Bridge(tokenizer).extend([5], [{"role": "", "content": "42<eos>7<think>"}])
    shown = "".join(tokenizer._backend.id_to_token(token) for token in tokens)
    shown = re.sub("<0x(..)>", lambda byte: chr(int(byte[1], 16)), shown)  # not in the vocabulary
    assert shown.replace("##", "").replace("▁", "") == "42<eos>7<think>"


def test_text_without_added_tokens_has_the_usual_tokens() -> None:
    for kind, tokenizer in TOKENIZERS.items():
        for text in ("42 is 6 * 7", "a    b\n    c", "user: 1 < 2 > 0"):
            assert tokenizer.encode_marked(tokenizer.as_text(text)) == tokenizer.encode(text), kind


def test_the_quickstarts_tokenizer() -> None:
    fast = make_tokenizer([*ROLES, *PRINTABLE], r"</?[a-z]+>|[\s\S]", 128)
    fast.add_special_tokens({"additional_special_tokens": ROLES})
    backend = fast.backend_tokenizer
    text = "42<eos><assistant>7"
    plain = PlainText(backend)
    tokens = plain.encode(plain.mark(text))
    assert tokens == [backend.token_to_id(character) for character in text]
