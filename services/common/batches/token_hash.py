"""Hashes token ids, so that two services can compare long prompts without sending them back."""

import hashlib
from collections.abc import Sequence

import numpy as np


def tokens_sha256(tokens: Sequence[int]) -> str:
    """Returns the SHA-256 of `tokens`, each as a little-endian uint32, as 64 lowercase hexadecimal digits."""
    return hashlib.sha256(np.asarray(tokens, "<u4").tobytes()).hexdigest()
