"""Tests that a GPU computes the same hash of weights as a CPU."""

import pytest
import torch

from services.common.weights.buckets import WeightDigest

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("start", [0, 16, 3 << 40])
@pytest.mark.parametrize("num_rounds", [0, 1, 3])
@pytest.mark.parametrize("num_more", [-2, 0, 2, 1000, 2560])
def test_sums_are_those_of_a_cpu(num_rounds: int, num_more: int, start: int) -> None:
    from services.common.weights.digest_gpu import _BLOCK, _PROGRAMS  # late: it imports Triton

    num_words = max(2, num_rounds * _PROGRAMS * _BLOCK + num_more)
    words = torch.randint(-(2**63), 2**63 - 1, (num_words,), generator=torch.Generator().manual_seed(num_words))
    sums = []
    for device in ("cpu", "cuda"):
        digest = WeightDigest("", torch.device(device))
        digest.update(words.view(torch.uint8).to(device), start=start)
        sums.append(digest.sums())
    assert sums[0] == sums[1]
