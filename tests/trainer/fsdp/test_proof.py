"""Tests that the proof at start finds what would silently train another model than the one that is served."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from services.common.errors import InvalidInput
from services.trainer.fsdp import model as models
from services.trainer.fsdp.loading import largest_difference, layout_of
from services.trainer.fsdp.model import PACKED_ATTENTION, Layout, LogprobModel, Rows, packed_attention
from services.trainer.proof import MOST_NATS, shrink
from services.trainer.structure import Structure, make_model, structure_of
from tests.support import raises
from tests.trainer.zoo_harness import zoo_config

Patch = Callable[[pytest.MonkeyPatch], None]


def attending(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Patch:
    """Changes the keywords that layers hand to their attention."""

    def changed(*tensors: Any, **kwargs: Any) -> Any:
        return packed_attention(*tensors, **kwargs | change(kwargs))

    return lambda patch: patch.setitem(AttentionInterface._global_mapping, PACKED_ATTENTION, changed)


def structured(**changes: float) -> Patch:
    def changed(causal_lm: Any) -> Structure:
        return replace(structure_of(causal_lm), **changes)

    return lambda patch: patch.setattr(models, "structure_of", changed)


def leaking(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rows, "scatter", lambda self, packed: packed[None])
    patch.setattr(Rows, "gather", lambda self, rows: rows[0])


def one_sequence(kwargs: dict[str, Any]) -> dict[str, Any]:
    bounds = kwargs["cu_seqlens"]
    return {"cu_seqlens": bounds[[0, -1]], "max_seqlen": int(bounds[-1])}


def wider(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_window": kwargs["sliding_window"] and kwargs["sliding_window"] + 1}


RECURRENT = (
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "kimi_linear",
    "lfm2",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_text",
    "qwen3_next",
    "zamba2",
)
MUTANTS: dict[str, tuple[str, Patch]] = {
    "attention over all sequences": ("qwen3", attending(one_sequence)),
    "a window that is one too long": ("mistral_window", attending(wider)),
    "a window that is one too long in every other layer": ("gemma3_text", attending(wider)),
    "a window that is left out": ("phi3_window", attending(lambda kwargs: {"sliding_window": None})),
    "sinks that are left out": ("gpt_oss", attending(lambda kwargs: {"s_aux": None})),
    "scores that are not capped": ("gemma2", attending(lambda kwargs: {"softcap": None})),
    "another scale of scores": ("granite", attending(lambda kwargs: {"scaling": None})),
    "logits that are not capped": ("gemma2", structured(softcap=0.0)),
    "logits that are not scaled": ("granite", structured(scale=1.0)),
    "a hidden state that is not scaled": ("minicpm3", structured(scale=1.0)),
    **{f"a state that leaks in {name}": (name, leaking) for name in RECURRENT},
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_of_each_mixer_is_seen(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, patch = MUTANTS[mutant]
    patch(monkeypatch)
    assert largest_difference(zoo_config(name), Layout.PACKED) > MOST_NATS


def test_a_model_that_only_rows_compute_exactly_is_computed_in_rows() -> None:
    assert layout_of(zoo_config("llama4_text")) is Layout.ROWS
    assert layout_of(zoo_config("mistral_window")) is Layout.PACKED


def test_a_model_that_nothing_computes_exactly_is_refused_with_the_difference() -> None:
    with raises(InvalidInput, field="model") as raised:
        layout_of(zoo_config("glm_moe_dsa"))
    assert "in padded rows: log-probabilities differ by up to " in raised.value.message


def test_attention_refuses_what_it_does_not_know() -> None:
    packed = {"cu_seqlens": torch.tensor([0, 3], dtype=torch.int32), "max_seqlen": 3}
    qkv = torch.zeros(3, 1, 2, 3, 4)
    packed_attention(torch.nn.Identity(), *qkv, None, **packed, position_bias=None, dropout=0.0)
    for more in ({"position_bias": torch.zeros(1)}, {"scores": 2}):
        with raises(InvalidInput, field="model"):
            packed_attention(torch.nn.Identity(), *qkv, None, **packed, **more)
    with raises(InvalidInput, field="model"):
        packed_attention(torch.nn.Identity(), *qkv, torch.ones(3, 3), **packed)


def test_the_vision_tower_is_frozen_and_the_text_part_is_not() -> None:
    wrapped = LogprobModel(make_model(zoo_config("gemma3")), Layout.PACKED)
    trained = {name for name, parameter in wrapped.causal_lm.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in wrapped.causal_lm.named_parameters() if "language_model" in name}


def test_the_small_copy_has_a_layer_of_each_kind() -> None:
    small = shrink(zoo_config("qwen3_next"))
    assert small.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    assert shrink(zoo_config("gemma2")).num_hidden_layers == 2
