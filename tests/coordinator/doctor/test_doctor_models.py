"""Tests that `lockstep doctor` asks the trainer about models that only it can judge."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from services.common.config.trainer import TrainerConfig
from services.common.errors import InvalidInput
from services.coordinator.doctor import Finding, inputs
from services.coordinator.doctor.inputs import examine_environment, examine_inputs
from services.coordinator.fleet.launch import Addresses
from tests.coordinator.doctor.findings import FAIL, OK, assert_fails, config_with
from tests.coordinator.fake_services import make_config, make_prompt
from tests.support import ROOT


@pytest.mark.parametrize("use_mbridge", [False, True])
def test_a_model_that_mbridge_builds_is_compared_by_the_trainer(
    use_mbridge: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def describe(directory: str, trainer: TrainerConfig) -> None:
        asked.append(trainer)
        raise InvalidInput("differs", field="model")

    monkeypatch.setattr(inputs.probes, "describe_model", describe)
    trainer = {"strategy": "megatron", "num_ranks": 1, "megatron": {"use_mbridge": use_mbridge}}
    model, *_ = examine_inputs(config_with(trainer=trainer), Addresses())
    assert len(asked) == use_mbridge
    assert (model.check == "attention") != use_mbridge
    if use_mbridge:
        assert_fails(model, FAIL, "differs", "this strategy can train")


@pytest.mark.parametrize(("refusal", "fix"), [("", "set strategy to fsdp"), ("no layers", "either: no layers")])
def test_fsdp_is_asked_about_a_model_that_megatron_refuses(
    refusal: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def describe(directory: str, trainer: TrainerConfig) -> dict[str, object]:
        assert trainer.strategy == "fsdp"
        if refusal:
            raise InvalidInput(refusal, field="model")
        return {}

    monkeypatch.setattr(inputs.probes, "describe_model", describe)
    directory = shutil.copytree(config_with().model, tmp_path / "model")
    content = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(content | {"model_type": "gemma2"}))
    trainer = {"strategy": "megatron", "num_ranks": 1}
    model, _ = examine_inputs(make_config(model=str(directory), trainer=trainer), Addresses())
    assert_fails(model, FAIL, "not gemma2", fix)


def test_a_target_of_adapters_that_is_not_there_is_no_fault_of_the_model() -> None:
    lora = {"rank": 8, "target_modules": ["q_proj"]}
    model, *_ = examine_inputs(config_with(trainer={"lora": lora}), Addresses())
    assert_fails(model, FAIL, "kind lora has no q_proj", "correct trainer.lora.target_modules")


@pytest.mark.parametrize(
    ("trainer", "gpus", "kernel"),
    [
        ({}, [], "padded samples"),
        ({}, ["0"], "torch's variable-length"),
        ({"compute_dtype": "float32"}, ["0"], "padded samples"),
        ({"strategy": "megatron"}, ["0"], "TransformerEngine chooses"),
        ({"strategy": "megatron"}, [], "torch's operators"),
    ],
)
def test_what_computes_attention_is_named(
    trainer: dict[str, object], gpus: list[str], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "visible_gpus", lambda: gpus)
    attention, *_ = examine_inputs(config_with(trainer=trainer), Addresses())
    assert attention.check == "attention" and kernel in attention.result


def test_a_teacher_with_another_tokenizer_is_found(tmp_path: Path) -> None:
    directory = shutil.copytree(config_with().model, tmp_path / "teacher")
    distilled = {"advantage": {"kind": "distill"}, "teacher": {"model": str(directory)}}
    shape = json.loads((directory / "config.json").read_text()) | {"max_position_embeddings": 32768}
    (directory / "config.json").write_text(json.dumps(shape))

    def found() -> Finding:
        return next(one for one in examine_inputs(config_with(**distilled), Addresses()) if one.check == "teacher")

    same = found()
    assert (same.verdict, "with the tokenizer of the policy" in same.result) == (OK, True)
    content = json.loads((directory / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Lowercase"}
    (directory / "tokenizer.json").write_text(json.dumps(content))
    assert_fails(found(), FAIL, "it has another normalizer", "choose another teacher.model")


def test_a_prompt_that_the_command_of_an_agent_cannot_have_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "check_agent", lambda environment: Finding("environment", "there"))
    config = config_with(environment={"kind": "agent", "command": ["solve", "{prompt}"]})
    user, system = ({"role": role, "content": "x"} for role in ("user", "system"))
    for row_prompt, verdicts in (("x", [OK]), ([user], [OK]), ([system, user], [OK, FAIL])):
        data: Any = SimpleNamespace(train=SimpleNamespace(prompts=[replace(make_prompt(0), row_prompt=row_prompt)]))
        assert [one.verdict for one in examine_environment(config, Addresses(), data)] == verdicts


def test_weights_of_another_model_than_config_json_fails(tmp_path: Path) -> None:
    model = Path(shutil.copytree(ROOT / "deploy" / "quickstart" / "model", tmp_path / "model"))
    content = json.loads((model / "config.json").read_text())
    for changes, problem in (
        ({"vocab_size": 17}, "model.safetensors: model.embed_tokens.weight has shape [16, 128], but config.json gives"),
        ({"num_hidden_layers": 5, "layer_types": None}, "has no tensor model.layers.4.self_attn.q_proj.weight, "),
        ({"tie_word_embeddings": False}, f"{model} has no tensor lm_head.weight"),
        ({"attention_bias": "x"}, f"{model}/config.json: StrictDataclassFieldValidationError"),
        ({"head_dim": 0}, f"{model}/config.json is not the config of a model: head_dim is 0"),
    ):
        (model / "config.json").write_text(json.dumps(content | changes))
        found, *_ = examine_inputs(make_config(model=str(model)), Addresses())
        assert_fails(found, FAIL, problem, "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype("int8")
    save_file(tensors, model / "model.safetensors")
    (model / "config.json").write_text(json.dumps(content))
    found, *_ = examine_inputs(make_config(model=str(model)), Addresses())
    assert_fails(found, FAIL, "model.norm.weight has dtype I8; weights must be F64", "model")
