"""Defines the toy policy: 32 bytes of weights that decide every sample, so that other weights give other samples."""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # an engine starts without protobuf
    from lockstep.types.v1.types_pb2 import WeightGroup

MODEL_WEIGHTS = hashlib.sha256(b"the starting model").digest()
_EOS, _MAX_TOKENS = 1, 6


def digest_of(weights: bytes) -> str:
    """Returns the digest of a publication of `weights`."""
    return weights.hex()[:32]


def name_of(group: "WeightGroup") -> str:
    """Returns a weight group's name in the store, which no group of another run on the same services has."""
    return f"{group.store_secret.hex()} {group.epoch}"


def sample(weights: bytes, prompt: Sequence[int], seed: int) -> list[int]:
    """Returns the completion that `weights` give for a prompt and a seed."""
    content = hashlib.sha256(weights + bytes(prompt) + seed.to_bytes(8, "big")).digest()
    return [2 + byte % 50 for byte in content[1 : 2 + content[0] % (_MAX_TOKENS - 1)]] + [_EOS]


def logprobs(weights: bytes, tokens: Sequence[int]) -> list[float]:
    """Returns the log-probabilities that both engine and trainer compute for a sample.

    Each is a binary fraction, and therefore exact as float32.
    """
    return [-(1 + weights[token % 32]) / 256 for token in tokens]


def after(weights: bytes, batch: bytes) -> bytes:
    """Returns the weights after an update with a batch whose content is `batch`."""
    return hashlib.sha256(weights + batch).digest()
