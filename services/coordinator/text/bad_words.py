"""Makes token sequences of bad words, and checks them and the stop strings of a config."""

from collections.abc import Sequence

from services.common.config.rollout import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from services.common.config.run import Config
from services.common.errors import InvalidInput
from services.coordinator.text.tokenizer import Tokenizer, stop_tokens


def token_sequences(tokenizer: Tokenizer, bad_words: Sequence[str]) -> list[list[int]]:
    """Returns the same token sequences as vLLM's SamplingParams.update_from_tokenizer.

    Each word has one and, if it begins with another token after a space but is as long, one after a space too. That of
    a word without tokens is empty; vLLM would refuse the word.

    Raises:
        InvalidInput: See Tokenizer.encode.
    """
    sequences: list[list[int]] = []
    for word in dict.fromkeys(bad_words):
        alone, spaced = (tokenizer.encode(space + word.lstrip()) for space in ("", " "))
        sequences.append(alone)
        if spaced and len(spaced) == len(alone) and spaced[0] != alone[0]:
            sequences.append(spaced)
    return sequences


def check_words(tokenizer: Tokenizer, config: Config) -> None:
    """Checks the stop strings, and the bad words of training and of all evaluation sets.

    Raises:
        InvalidInput: A stop string has no text; a bad word has no tokens, there are too many, or no stop token could be
            sampled.
    """
    stops = stop_tokens(tokenizer, config.rollout.sampling)
    for text in filter(tokenizer.has_token, config.rollout.sampling.stop):
        if not tokenizer.decode(tokens := tokenizer.encode(text)) and not {*tokens} <= {*stops}:
            fix = f"set stop_token_ids to {tokens}, or add it to eos_token_id of the model's generation_config.json"
            message = f"rollout.sampling.stop: {text!r} is a special token and has no text to be found: {fix}"
            raise InvalidInput(message, field="rollout.sampling.stop")
    of_sets = {f"evaluation.sets.{name}": settings.bad_words for name, settings in config.evaluation.sets.items()}
    for section, bad_words in {"rollout.sampling": config.rollout.sampling.bad_words, **of_sets}.items():
        try:
            why = _why_not(tokenizer, bad_words, stops)
        except InvalidInput as error:
            why = error.message
        if why:
            raise InvalidInput(f"{section}.bad_words: {why}", field=f"{section}.bad_words")


def _why_not(tokenizer: Tokenizer, bad_words: Sequence[str], stops: Sequence[int]) -> str:
    """Returns why a completion cannot be sampled without `bad_words`; "" if it can."""
    sequences = token_sequences(tokenizer, bad_words)
    if not all(sequences):
        empty = next(word for word in bad_words if not all(token_sequences(tokenizer, [word])))
        return f"{empty!r} has no tokens that could be forbidden; leave it out"
    if len(sequences) > MAX_BAD_WORDS or sum(map(len, sequences)) > MAX_BAD_WORD_TOKENS:
        return (
            f"they are {len(sequences)} token sequences, with and without a space before, of "
            f"{sum(map(len, sequences))} tokens; vLLM takes at most {MAX_BAD_WORDS} with {MAX_BAD_WORD_TOKENS} tokens"
        )
    if stops and set(stops) <= {tokens[0] for tokens in sequences if len(tokens) == 1}:
        return f"they are all stop tokens ({stops}), so every completion would reach max_tokens; leave one of them out"
    return ""
