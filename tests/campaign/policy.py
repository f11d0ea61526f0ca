"""What the toy policy is: 32 bytes of weights that decide every sample, so that other weights give other samples."""

import hashlib
from collections.abc import Sequence

MODEL_WEIGHTS = hashlib.sha256(b"the starting model").digest()
_EOS, _MAX_TOKENS = 1, 6


def digest_of(weights: bytes) -> str:
    """The digest of a publication."""
    return weights.hex()[:32]


def sample(weights: bytes, prompt: Sequence[int], seed: int) -> list[int]:
    """The completion that `weights` give."""
    content = hashlib.sha256(weights + bytes(prompt) + seed.to_bytes(8, "big")).digest()
    return [2 + byte % 50 for byte in content[1 : 2 + content[0] % (_MAX_TOKENS - 1)]] + [_EOS]


def logprobs(weights: bytes, tokens: Sequence[int]) -> list[float]:
    """What both engine and trainer compute of a sample. Each is a binary fraction, and exact as float32."""
    return [-(1 + weights[token % 32]) / 256 for token in tokens]


def after(weights: bytes, batch: bytes) -> bytes:
    """The weights after an update with a batch of content `batch`."""
    return hashlib.sha256(weights + batch).digest()
