"""Tests torch's kernel of packed attention, in bfloat16 on a GPU, against padded attention in float32."""

from typing import Any

import pytest
import torch

from services.common.families.supported import HAS_FLASH_ATTN
from services.trainer.fsdp.model import packed_attention

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

LENGTHS = (3, 70, 1, 129, 40)
# A bfloat16 number has 8 bits, so that a product is off by 2^-9 = 2e-3 of it, and a sum of hundreds by some of these.
TOLERANCE = 2e-2
CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "a window": {"sliding_window": 16},
    "sinks": {"s_aux": True},
    "sinks and a window": {"s_aux": True, "sliding_window": 16},
    "another scale": {"scaling": 0.3},
}


def results(case: dict[str, Any], sizes: tuple[int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns output and gradients of the same numbers in `dtype`; `sizes` are those of query and value heads."""
    generator = torch.Generator("cuda").manual_seed(0)
    bounds = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32, device="cuda")

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16().to(dtype).requires_grad_()

    total, (query_size, value_size) = sum(LENGTHS), sizes
    inputs = [draw(1, 8, total, query_size), draw(1, 2, total, query_size), draw(1, 2, total, value_size)]
    weights = torch.randn(1, total, 8, value_size, generator=generator, device="cuda")
    case = dict(case)
    if case.get("s_aux"):
        case["s_aux"] = draw(8)
        inputs.append(case["s_aux"])
    out, _ = packed_attention(
        torch.nn.Identity(), *inputs[:3], None, cu_seqlens=bounds, max_seqlen=max(LENGTHS), **case
    )
    return [out, *torch.autograd.grad((out.float() * weights).sum(), inputs)]


@pytest.mark.skipif(not HAS_FLASH_ATTN, reason="needs flash-attn")
@pytest.mark.parametrize("case", [{"softcap": 2.0}, {"softcap": 2.0, "sliding_window": 16}], ids=str)
@pytest.mark.parametrize("size", [64, 256])
def test_flash_attn_computes_capped_scores(case: dict[str, Any], size: int) -> None:
    got, want = (results(case, (size, size), dtype) for dtype in (torch.bfloat16, torch.float32))
    for one, other in zip(got, want, strict=True):
        assert float((one.float() - other).abs().max()) <= TOLERANCE * float(other.abs().max())


@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (96, 64)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_computes_what_padded_attention_does(case: str, sizes: tuple[int, int]) -> None:
    got, want = (results(CASES[case], sizes, dtype) for dtype in (torch.bfloat16, torch.float32))
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape
        assert float((one.float() - other).abs().max()) <= TOLERANCE * float(other.abs().max())
