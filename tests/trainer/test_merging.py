"""Adapters merged into weights: the exact sum, rounded once."""

import pytest
import torch

from services.trainer.adapters import write_merged

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
GROUPS, ROWS, INPUTS, SCALE = 2, 192, 320, 0.75


@pytest.mark.parametrize("rank", [1, 8, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("device", DEVICES)
def test_the_sum_is_rounded_once(device: str, dtype: torch.dtype, rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    whole = torch.randn(GROUPS, 2 * ROWS, INPUTS, generator=generator).to(device, dtype)
    b = torch.randn(GROUPS, ROWS, rank, generator=generator).to(device, dtype)
    a = torch.randn(rank, INPUTS, generator=generator).to(device, dtype)
    before = whole.clone()
    exact = before[:, :ROWS].double() + SCALE * (b.double() @ a.double())
    write_merged(whole[:, :ROWS], before[:, :ROWS], b, a, SCALE)
    assert torch.equal(whole[:, ROWS:], before[:, ROWS:])
    got = whole[:, :ROWS].double()
    # The sums of `rank` products are exact to 2^-24 of the largest terms each; bfloat16 rounds to 2^-8 of the result.
    sums = 2**-24 * (rank + 2) * (before[:, :ROWS].double().abs() + SCALE * (b.double().abs() @ a.double().abs()))
    rounding = 2**-8 * exact.abs() if dtype is torch.bfloat16 else 2**-24 * exact.abs()
    assert ((got - exact).abs() <= sums + rounding).all()
    assert (got == exact.to(dtype).double()).double().mean() > (0.99 if dtype is torch.bfloat16 else 0.2)


@pytest.mark.parametrize("device", DEVICES)
def test_an_adapter_that_is_zero_changes_nothing(device: str) -> None:
    weight = torch.randn(1, 64, 96).to(device, torch.bfloat16)
    before = weight.clone()
    write_merged(weight, weight, torch.zeros(1, 64, 16).to(weight), torch.randn(16, 96).to(weight), 2.0)
    assert torch.equal(weight, before)
