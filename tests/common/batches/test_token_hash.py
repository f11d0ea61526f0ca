"""Tests the hash of token ids against its definition."""

import hashlib
import struct

from services.common.batches import tokens_sha256


def test_tokens_are_little_endian_uint32():
    tokens = [0, 1, 258, 2**32 - 1]
    expected = hashlib.sha256(b"".join(struct.pack("<I", token) for token in tokens)).hexdigest()
    assert tokens_sha256(tokens) == tokens_sha256(tuple(tokens)) == expected
    assert tokens_sha256([]) == hashlib.sha256(b"").hexdigest()
    assert tokens_sha256([1, 0]) != tokens_sha256([0, 1])
