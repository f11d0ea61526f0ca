"""Tests which errors get the advice to use less memory."""

import pytest
import torch

from services.trainer.ranks.calls import out_of_memory_hint


def test_the_keys_of_the_role_are_named() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    assert "lower trainer.max_tokens_per_microbatch" in out_of_memory_hint(error, "policy")
    assert "lower critic.max_tokens_per_microbatch" in out_of_memory_hint(error, "critic")
    assert out_of_memory_hint(ZeroDivisionError("boom"), "policy") == ""


def test_the_cpu_allocator_is_recognized() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert "trainer.max_tokens_per_microbatch" in out_of_memory_hint(caught.value, "policy")
