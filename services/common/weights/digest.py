"""Computes a 128-bit content hash of weights on the device that has them, with one host transfer per publication.

Every 64-bit word is mixed with its position by a bijection (the finalizer of MurmurHash3, Appleby 2011), and two
different functions of the result are summed modulo 2^64. Changing one word therefore always changes the hash; several
changes cancel out with a probability of about 2^-128. The hash protects against faults, not against an adversary.
"""

import hashlib

import torch

_CONSTANTS = (0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
_POSITION, _MIX_1, _MIX_2 = (constant - (1 << 64) for constant in _CONSTANTS)
# A piece and its scratch memory stay in a core's cache, and torch does not divide so few elements among threads. On two
# busy cores pieces of 64 MiB took 24 times as much CPU time.
_CHUNK_WORDS = 32 << 10


def _shift_right(words: torch.Tensor, bits: int) -> torch.Tensor:
    # torch shifts int64 arithmetically; a logical shift keeps the mixing a bijection.
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _mix_words(words: torch.Tensor, first: int) -> torch.Tensor:
    index = torch.arange(first + 1, first + 1 + words.numel(), dtype=torch.int64, device=words.device)
    words = words ^ (index * _POSITION)
    words = (words ^ _shift_right(words, 33)) * _MIX_1
    words = (words ^ _shift_right(words, 33)) * _MIX_2
    return words ^ _shift_right(words, 33)


# The two sums over a part of the content: the state of a WeightDigest without its plan. (0, 0) is no content.
Sums = tuple[int, int]


class WeightDigest:
    """Hashes the buckets of a publication, in any order; `hexdigest` returns the hash of the whole content.

    A part of the content whose `sums` are known need not be hashed again.
    """

    def __init__(self, plan_digest: str, device: torch.device, sums: Sums = (0, 0)):
        self._plan_digest = plan_digest
        self._sums = torch.tensor(sums, dtype=torch.int64, device=device)

    def update(self, flat: torch.Tensor, *, start: int) -> None:
        """Adds a bucket (uint8, a multiple of 16 bytes) that starts at byte `start` of the publication."""
        words, first = flat.view(torch.int64), start // 8
        if words.is_cuda:
            from services.common.weights.digest_gpu import add_sums

            add_sums(self._sums, words, first, _CONSTANTS)
            return
        for at in range(0, words.numel(), _CHUNK_WORDS):
            mixed = _mix_words(words[at : at + _CHUNK_WORDS], first + at)
            self._sums[0] += mixed.sum()
            self._sums[1] += ((mixed ^ _shift_right(mixed, 29)) * _MIX_1).sum()

    def add(self, sums: Sums) -> None:
        self._sums += torch.tensor(sums, dtype=torch.int64, device=self._sums.device)

    def sums(self) -> Sums:
        """Returns the sums of the content that was added so far. Waits for the device."""
        first, second = map(int, self._sums.cpu())
        return first, second

    def hexdigest(self) -> str:
        """Returns the hash of plan and content as 32 hexadecimal digits. Waits for the device."""
        hasher = hashlib.blake2b(self._plan_digest.encode(), digest_size=16)
        for value in self.sums():
            hasher.update(value.to_bytes(8, "little", signed=True))
        return hasher.hexdigest()
