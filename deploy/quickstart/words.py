"""Makes tokenizers whose tokens are given words, for small models that are made from random weights."""

from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
"""Tokens 0, 1 and 2 of every vocabulary."""


def make_tokenizer(words: Sequence[str], pattern: str, max_tokens: int) -> PreTrainedTokenizerFast:
    """Returns a tokenizer that splits text at every match of `pattern`, a regular expression.

    A match that is none of `words` becomes the unknown token. Decoding joins the words without spaces, so that a word
    that follows a space must begin with it.
    """
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys((PAD, EOS, UNKNOWN, *words)))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN, model_max_length=max_tokens
    )
