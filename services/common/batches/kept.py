"""Encodes kept sets: for each token of a completion, the tokens that truncated sampling kept and drew it from.

The kept sets of a completion of n tokens are n counts, and then the tokens of all sets one after another, all as
little-endian uint32. A token that the policy did not sample has the count 0: those of an environment.
"""

from collections.abc import Iterable, Sequence

import numpy as np

_TYPE = np.dtype("<u4")


def encode_kept(sets: Sequence[np.ndarray | Sequence[int]]) -> bytes:
    """Returns the bytes of the kept set of each token."""
    counts = np.array([len(kept) for kept in sets], _TYPE)
    return b"".join((counts.tobytes(), *(np.asarray(kept).astype(_TYPE).tobytes() for kept in sets)))


def decode_kept(data: bytes | memoryview, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the size of each token's set, int64 [num_tokens], and the tokens of all sets, uint32.

    Raises:
        ValueError: These are not the kept sets of `num_tokens` tokens.
    """
    if len(data) % _TYPE.itemsize:
        raise ValueError(f"{len(data)} bytes are not whole numbers")
    numbers = np.frombuffer(data, _TYPE)
    counts, kept = numbers[:num_tokens].astype(np.int64), numbers[num_tokens:]
    if len(counts) != num_tokens or counts.sum() != len(kept):
        raise ValueError(f"{len(numbers)} numbers are not the kept sets of {num_tokens} tokens")
    return counts, kept


def keeps_sampled(tokens: np.ndarray, counts: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Returns whether each of `tokens` is in its own set, bool [tokens]; for the results of `decode_kept`."""
    own = np.repeat(np.arange(len(tokens)), counts)
    is_kept = np.zeros(len(tokens), bool)
    is_kept[own[kept == tokens[own]]] = True
    return is_kept


def join_kept(parts: Iterable[tuple[bytes, int]]) -> bytes:
    """Returns the kept sets of a completion that consists of `parts`: the kept sets and number of tokens of each.

    The tokens of a part without kept sets, which is empty bytes, have the count 0.
    """
    counts: list[bytes] = []
    kept: list[bytes] = []
    for data, num_tokens in parts:
        size = num_tokens * _TYPE.itemsize
        counts.append(data[:size] or bytes(size))
        kept.append(data[size:])
    return b"".join((*counts, *kept))
