"""Encodes the tokens that a teacher finds most probable, with their log-probabilities: 8 k + 4 bytes for each place."""

import numpy as np

PADDING = -1
"""The number in place of a token, where fewer than k tokens can be sampled. Its log-probability is 0."""


def top_k_bytes(k: int, num_tokens: int) -> int:
    return (8 * k + 4) * num_tokens


def encode_top_k(tokens_TK: np.ndarray, logprobs_TK: np.ndarray) -> bytes:
    """Returns the bytes of k tokens at each of T places, with k + 1 log-probabilities; the last is of all others."""
    return tokens_TK.astype("<i4").tobytes() + logprobs_TK.astype("<f4").tobytes()


def decode_top_k(data: bytes | memoryview, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens, int32 [num_tokens, k], and the log-probabilities, float32 [num_tokens, k + 1].

    Raises:
        ValueError: These are not the same number of tokens for each of `num_tokens` places.
    """
    k, rest = divmod(len(data) - top_k_bytes(0, num_tokens), 8 * num_tokens)
    if rest or k < 1:
        raise ValueError(
            f"{len(data)} bytes are not k tokens and k + 1 log-probabilities at each of {num_tokens} places"
        )
    tokens = np.frombuffer(data, "<i4", num_tokens * k).reshape(num_tokens, k)
    return tokens, np.frombuffer(data, "<f4", num_tokens * (k + 1), tokens.nbytes).reshape(num_tokens, k + 1)
