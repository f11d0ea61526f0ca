"""Tests that the FSDP model computes the same as transformers in inference mode, with all gradients."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from services.common.errors import InvalidInput
from tests.support import make_model
from tests.trainer import plain_grpo
from tests.trainer.fsdp_harness import TEMPERATURE, Harness, samples

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Random in training mode.
RANDOM = {
    "seed_oss": {"head_dim": 16, "residual_dropout": 0.4, "attention_dropout": 0.4},
    "mixtral": {**EXPERTS, "router_jitter_noise": 0.5, "sliding_window": None},
    "starcoder2": {"residual_dropout": 0.4, "embedding_dropout": 0.4, "sliding_window": None},
    "phimoe": {**EXPERTS, "router_jitter_noise": 0.5, "input_jitter_noise": 0.5, "sliding_window": None},
}


def write_other(directory: Path, kind: str, **changes: Any) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SHAPE | RANDOM.get(kind, {}) | changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory / kind)
    return directory


@pytest.mark.parametrize("is_recomputed", [False, True])
@pytest.mark.parametrize("kind", RANDOM)
def test_nothing_is_random(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_recomputed: bool
) -> None:
    monkeypatch.setattr(harness, "_models", write_other(tmp_path, kind))
    harness.open(kind, {"gradient_checkpointing": is_recomputed})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / kind).eval()
    with torch.no_grad():
        want = np.concatenate([plain_grpo.score(model, row, TEMPERATURE)[0] for row in samples().to_pylist()])
    np.testing.assert_allclose(np.concatenate(harness.logprobs(samples())), want, rtol=0, atol=1e-5)
    # In training too: the first mini-batch's ratio is exactly 1, and an update has the same gradient twice.
    first, _ = harness.gradients_of(samples())
    harness.open(kind, {"gradient_checkpointing": is_recomputed})
    again, _ = harness.gradients_of(samples())
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_pad_token_in_the_text_has_a_gradient(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts contain it where the pad token is the end token of a turn."""
    make_model(tmp_path / "untied", "untied")
    monkeypatch.setattr(harness, "_models", tmp_path)
    path, gradients = tmp_path / "untied" / "config.json", []
    token = samples()["prompt_tokens"][0].as_py()[0]
    for pad in (token, None):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token_id": pad}))
        harness.open("untied", {})
        gradients.append(harness.gradients_of(samples())[0]["model.embed_tokens.weight"])
    assert gradients[0][token].abs().max() > 0
    assert torch.equal(*gradients)


@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
def test_a_tied_output_layer_of_other_values_is_refused(
    harness: Harness, trainer_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    shutil.copytree(trainer_files / "models" / "tied", tmp_path / "model")
    monkeypatch.setattr(harness, "_models", tmp_path)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    for name, is_same in (("copy", True), ("other", False)):
        output = tensors["model.embed_tokens.weight"].clone()
        output[-1, -1] += 0 if is_same else 1
        save_file(tensors | {"lm_head.weight": output}, file, metadata={"format": "pt"})
        if is_same:
            harness.open("model", {"strategy": strategy})
            assert {name for name, _ in harness.backend.weight_specs()} == tensors.keys()
        else:
            with pytest.raises(InvalidInput, match=r"ties lm_head\.weight to model\.embed_tokens\.weight"):
                harness.open("model", {"strategy": strategy})


@pytest.mark.parametrize("kind", ["stablelm", "nemotron", "gpt2", "gpt_neox", "bloom", "xglm"])
def test_architectures_of_other_structure_are_refused_by_name(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    shape = {key: SHAPE[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")}
    shape |= {"num_key_value_heads": 2} if kind == "nemotron" else {}
    monkeypatch.setattr(harness, "_models", tmp_path)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape)).save_pretrained(tmp_path / kind)
    with pytest.raises(InvalidInput, match=f"model_type {kind}, .* is not supported with strategy fsdp"):
        harness.open(kind, {})


def test_experts_of_a_width_that_torch_cannot_compute_are_refused(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "_models", tmp_path)
    write_other(tmp_path, "mixtral", intermediate_size=90)
    with pytest.raises(
        InvalidInput, match=r"experts\.down_proj of shape \[4, 64, 90\].*multiple of 4 in torch\.float32"
    ):
        harness.open("mixtral", {})


def test_rotary_scaling_that_depends_on_the_pack_is_refused(
    harness: Harness, trainer_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(trainer_files / "models" / "untied", tmp_path / "model")
    monkeypatch.setattr(harness, "_models", tmp_path)
    path = tmp_path / "model" / "config.json"
    rope = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}
    path.write_text(json.dumps(json.loads(path.read_text()) | rope))
    with pytest.raises(InvalidInput, match="rotary scaling 'dynamic' is not supported by any strategy"):
        harness.open("model", {})
