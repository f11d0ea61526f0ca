"""Tests that a text behind another one has the tokens that it has there, whatever the tokenizer puts before a text."""

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from services.coordinator.text.continued import encode_continued
from services.coordinator.text.tokenizer import Tokenizer

_PREPENDED = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
_STRIPPED = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
KINDS = {
    **{
        f"metaspace, {scheme}": (None, pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False), _STRIPPED)
        for scheme in ("always", "first", "never")
    },
    **{
        f"byte-level, {adds}": (None, pre_tokenizers.ByteLevel(add_prefix_space=adds), decoders.ByteLevel())
        for adds in (True, False)
    },
    "prepended": (_PREPENDED, None, _STRIPPED),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_continued_text_has_its_tokens_in_the_whole(kind: str) -> None:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer, backend.pre_tokenizer, backend.decoder = KINDS[kind]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["say: hi\nhi. say hi"] * 9, trainer)
    backend.add_special_tokens(["<x>"])
    tokenizer = Tokenizer(backend, None, (0,))
    pairs = [(before, text) for before in ("say:", "say: ", "say:\n", "hi<x>") for text in ("hi", " hi", "\nhi<x>hi")]
    num_apart = 0
    for (before, text), tokens in zip(pairs, encode_continued(tokenizer, pairs), strict=True):
        head, whole = tokenizer.encode(before), tokenizer.encode(before + text)
        if whole[: len(head)] == head:
            assert head + tokens == whole, (before, text)
            num_apart += 1
        assert tokenizer.decode(head + tokens, skip_special_tokens=False) == tokenizer.decode(
            whole, skip_special_tokens=False
        ), (before, text)
    assert num_apart > len(pairs) / 2
