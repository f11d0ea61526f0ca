"""Tests which kernel computes attention, and that flash-attn, which no test host has, gets the right arguments."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights

from services.common.families import supported
from services.common.families.supported import Kernel, choose
from services.trainer import attention
from services.trainer.fsdp.model import kernels_of, packed_attention
from services.trainer.structure import make_model
from tests.trainer.zoo_harness import zoo_config

CUDA, CPU, HALF = torch.device("cuda"), torch.device("cpu"), torch.bfloat16
LENGTHS = (3, 17, 1, 9)


@pytest.mark.parametrize(
    ("case", "has_cap", "has_package", "kernel"),
    [
        ((CUDA, HALF, 256), False, False, Kernel.TORCH),
        ((CUDA, HALF, 256), False, True, Kernel.TORCH),
        ((CUDA, HALF, 256), True, True, Kernel.FLASH_ATTN),
        ((CUDA, HALF, 256), True, False, Kernel.PADDED),
        ((CUDA, HALF, 512), True, True, Kernel.PADDED),
        ((CUDA, HALF, 512), False, True, Kernel.PADDED),
        ((CUDA, HALF, 100), False, True, Kernel.PADDED),  # OpenLLaMA-3B
        ((CUDA, HALF, 100), True, True, Kernel.FLASH_ATTN),  # which pads heads itself
        ((CUDA, torch.float32, 64), True, True, Kernel.PADDED),
        ((CPU, HALF, 64), True, True, Kernel.PADDED),
    ],
)
def test_choice(
    monkeypatch: pytest.MonkeyPatch, case: tuple[Any, ...], has_cap: bool, has_package: bool, kernel: Kernel
) -> None:
    monkeypatch.setattr(supported, "HAS_FLASH_ATTN", has_package)
    device, dtype, head_size = case
    assert choose(device.type, str(dtype), head_size, has_cap=has_cap) is kernel


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("gemma2", [Kernel.FLASH_ATTN]),
        ("qwen3_next", [Kernel.TORCH]),
        ("deepseek_v3", [Kernel.TORCH]),
        ("gemma4_text", [Kernel.TORCH, Kernel.PADDED]),
    ],
)
def test_a_models_kernels_are_named(monkeypatch: pytest.MonkeyPatch, name: str, named: list[Kernel]) -> None:
    monkeypatch.setattr(supported, "HAS_FLASH_ATTN", True)
    with init_empty_weights(include_buffers=False):
        model = make_model(zoo_config(name), dtype=HALF)
    assert kernels_of(model, CUDA, HALF) == ", ".join(named)
    assert kernels_of(model, CPU, torch.float32) == Kernel.PADDED


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *several: Any, **settings: Any) -> torch.Tensor:
    """Computes what flash-attn documents, a sequence and a head at a time."""
    (bounds, same, longest, also), window = several, settings["window_size"]
    assert settings["causal"] and (bounds is same, longest, window[1]) == (True, also, 0)
    rows = []
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        heads = []
        for head in range(query.size(1)):
            of_keys = head // (query.size(1) // key.size(1))
            scores = query[begin:end, head] @ key[begin:end, of_keys].T * settings["softmax_scale"]
            scores = settings["softcap"] * torch.tanh(scores / settings["softcap"])
            before = torch.arange(end - begin)[:, None] - torch.arange(end - begin)[None, :]
            is_seen = (before >= 0) & ((before <= window[0]) | (window[0] < 0))
            heads.append(scores.masked_fill(~is_seen, float("-inf")).softmax(-1) @ value[begin:end, of_keys])
        rows.append(torch.stack(heads, 1))
    return torch.cat(rows)


@pytest.mark.parametrize("case", [{}, {"sliding_window": 4}, {"scaling": 0.7}], ids=str)
def test_flash_attn_gets_what_padded_attention_computes(monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    inputs = [torch.randn(1, heads, total, 16, generator=generator) for heads in (4, 2, 2)]
    bounds = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    kwargs = {"cu_seqlens": bounds, "max_seqlen": max(LENGTHS), "softcap": 2.0, **case}
    want, _ = packed_attention(torch.nn.Identity(), *inputs, None, **kwargs)
    monkeypatch.setattr(attention, "choose", lambda *_, **__: Kernel.FLASH_ATTN)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=plain))
    got, _ = packed_attention(torch.nn.Identity(), *inputs, None, **kwargs)
    # The same float32 sums in another order, of numbers of size 1.
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
