"""Tests what Megatron's config gets for float8, and where it is refused; benchmarks/fp8.py trains with it."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig

import services.trainer.megatron  # noqa: F401  (before megatron itself)
from services.common.config.trainer import TrainerConfig
from services.common.errors import PreconditionFailed, Reason
from services.trainer.megatron.settings import layer_settings, require_float8, transformer_config
from tests.support import raises

HF = AutoConfig.for_model(
    "qwen3", hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)


def config(fp8: str) -> Any:
    trainer = TrainerConfig.model_validate({"strategy": "megatron", "megatron": {"fp8": fp8}})
    return transformer_config(layer_settings(HF), trainer, torch.bfloat16, is_gpu=False)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("none", (None, "delayed")), ("tensorwise", ("hybrid", "tensorwise")), ("blockwise", ("e4m3", "blockwise"))],
)
def test_only_the_products_are_in_float8(kind: str, expected: tuple[str | None, str]) -> None:
    made, plain = config(kind), config("none")
    assert (made.fp8, made.fp8_recipe) == expected
    assert not made.fp8_param  # so the weights that are updated and published are bfloat16
    assert not (made.fp8_dot_product_attention or made.fp8_multi_head_attention)
    names = {name for name, value in vars(made).items() if not callable(value) and value != vars(plain)[name]}
    assert names <= {"fp8", "fp8_recipe"}


@pytest.mark.parametrize("key", ["trainer.megatron", "critic.megatron"])
def test_it_is_refused_on_cpu(key: str) -> None:
    settings = TrainerConfig.model_validate({"strategy": "megatron", "megatron": {"fp8": "blockwise"}}).megatron
    with raises(PreconditionFailed, reason=Reason.UNSUPPORTED_VERSION, field=f"{key}.fp8"):
        require_float8(settings, torch.device("cpu"), key)
    require_float8(TrainerConfig().megatron, torch.device("cpu"), key)


@pytest.mark.parametrize(
    ("fp8", "capability", "is_refused"),
    [
        ("tensorwise", (8, 0), True),
        ("tensorwise", (8, 9), False),
        ("blockwise", (8, 9), True),
        ("blockwise", (9, 0), False),
    ],
)
def test_it_needs_a_gpu_that_has_it(
    fp8: str, capability: tuple[int, int], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("services.trainer.megatron.settings.find_spec", lambda name: object())
    settings = TrainerConfig.model_validate({"strategy": "megatron", "megatron": {"fp8": fp8}}).megatron
    if is_refused:
        with raises(PreconditionFailed, reason=Reason.UNSUPPORTED_VERSION):
            require_float8(settings, torch.device("cuda"), "trainer.megatron")
    else:
        require_float8(settings, torch.device("cuda"), "trainer.megatron")
    monkeypatch.setattr("services.trainer.megatron.settings.find_spec", lambda name: None)
    with raises(PreconditionFailed, reason=Reason.UNSUPPORTED_VERSION):
        require_float8(settings, torch.device("cuda"), "trainer.megatron")
