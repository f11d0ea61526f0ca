"""Tests the rule for the dtype of Megatron's gradients, and what Megatron itself does with the two keys."""

from pathlib import Path
from typing import Any

import pytest

from services.common.config.layout import check_layout
from services.common.config.megatron import MegatronConfig
from services.common.errors import InvalidInput, Reason

KEY = "trainer.megatron.optimizer_config_kwargs.main_grads_dtype"


def checked(dtype: str, **ddp: Any) -> None:
    check_layout(MegatronConfig(optimizer_config_kwargs={"main_grads_dtype": dtype}, ddp_config=ddp), 1)


@pytest.mark.parametrize("dtype", ["bf16", "BF16", "fp16"])
def test_the_dtype_of_gradients_is_that_of_their_buffer(dtype: str) -> None:
    checked(dtype, grad_reduce_in_fp32=False)
    for ddp in ({}, {"grad_reduce_in_fp32": True}):
        with pytest.raises(InvalidInput) as caught:
            checked(dtype, **ddp)
        assert caught.value.message.startswith(f"{KEY} {dtype}") and caught.value.reason is Reason.INVALID_CONFIG
        assert "ddp_config.grad_reduce_in_fp32 is false; set that too" in caught.value.message


def test_float32_gradients_need_no_other_key() -> None:
    for dtype in ("fp32", "FP32"):
        checked(dtype)
        checked(dtype, grad_reduce_in_fp32=False)


def test_megatron_reads_the_key_only_to_check_it() -> None:
    """If this fails, Megatron-Core has begun to use main_grads_dtype, and the rule must be changed."""
    core = pytest.importorskip("megatron.core")
    lines = [
        (file.name, line.strip())
        for file in Path(core.__file__).parent.rglob("*.py")
        for line in file.read_text().splitlines()
        if "main_grads_dtype" in line
    ]
    assert [name for name, _ in lines] == ["optimizer_config.py"] * 3
    assert lines[0][1].startswith("main_grads_dtype: ") and "==" in lines[1][1] and "can only be" in lines[2][1]
