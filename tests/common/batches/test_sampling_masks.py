"""Kept sets as bytes."""

import numpy as np
import pytest

from services.common.batches import decode_sampling_masks, encode_sampling_masks, join_sampling_masks

SETS = [[3, 9], [], [70000]]


def test_what_is_encoded_is_decoded() -> None:
    counts, allowed = decode_sampling_masks(encode_sampling_masks(SETS), 3)
    assert counts.tolist() == [2, 0, 1]
    assert allowed.tolist() == [3, 9, 70000]
    assert encode_sampling_masks([np.array(one) for one in SETS]) == encode_sampling_masks(SETS)


def test_parts_without_kept_sets_have_empty_ones() -> None:
    parts = [(encode_sampling_masks(SETS), 3), (b"", 2), (encode_sampling_masks([[5]]), 1)]
    assert join_sampling_masks(parts) == encode_sampling_masks([*SETS, [], [], [5]])


@pytest.mark.parametrize("num_tokens", [2, 4, 7])
def test_another_number_of_tokens_is_refused(num_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"not the sampling masks of {num_tokens} tokens"):
        decode_sampling_masks(encode_sampling_masks(SETS), num_tokens)


def test_half_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="25 bytes"):
        decode_sampling_masks(encode_sampling_masks(SETS) + b"a", 3)
