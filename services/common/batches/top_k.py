"""Encodes the tokens that a teacher finds most probable, with their log-probabilities: 8 bytes for each."""

import numpy as np

PADDING = -1
"""The number in place of a token, where fewer than k tokens can be sampled. Its log-probability is 0."""


def encode_top_k(tokens_TK: np.ndarray, logprobs_TK: np.ndarray) -> bytes:
    """Returns the bytes of k tokens and their log-probabilities at each of T places."""
    return tokens_TK.astype("<i4").tobytes() + logprobs_TK.astype("<f4").tobytes()


def decode_top_k(data: bytes | memoryview, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens, int32, and the log-probabilities, float32, both [num_tokens, k]. k follows from the size.

    Raises:
        ValueError: These are not the same number of tokens for each of `num_tokens` places.
    """
    k, rest = divmod(len(data), 8 * num_tokens)
    if rest or not k:
        raise ValueError(f"{len(data)} bytes are not k tokens and log-probabilities for each of {num_tokens} tokens")
    tokens = np.frombuffer(data, "<i4", num_tokens * k).reshape(num_tokens, k)
    return tokens, np.frombuffer(data, "<f4", num_tokens * k, tokens.nbytes).reshape(num_tokens, k)
