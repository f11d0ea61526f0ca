"""Tests `lockstep export` of checkpoints of two ranks: one process on CPU writes the ranks' weights."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lockstep.trainer.v1 import trainer_pb2 as pb
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer as TrainerService
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from services.coordinator.cli.export import export_config
from services.coordinator.runs.ledger import LEDGER
from tests.e2e.forked.processes import preload
from tests.e2e.lockstep_command import invoke
from tests.support import PATIENCE_S
from tests.trainer.deployment import Deployment, config

TP2 = {"strategy": "megatron", "megatron": {"tensor_model_parallel_size": 2}}
CASES: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "megatron": TP2,
    "megatron by bucket": {**TP2, "megatron": {**TP2["megatron"], "fully_reshardable": False}},
    "adapters": {**TP2, "lora": {"rank": 4}},
    "adapters on fsdp": {"lora": {"rank": 4}},
}
# Each is a command that starts a trainer. What else these read, the tests of the backends' checkpoints read as well.
LONG = {"megatron", "megatron by bucket", "adapters on fsdp"}


async def lockstep(*arguments: object) -> tuple[int, str]:
    preload("services.trainer")
    done = await asyncio.to_thread(invoke, *arguments, cwd=Path(), timeout_s=10 * PATIENCE_S)
    return done.returncode, done.stdout + done.stderr


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("case", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in CASES])
async def test_the_export_is_what_the_ranks_held(deployment: Deployment, tmp_path: Path, case: str) -> None:
    await deployment.open("untied", **CASES[case])
    await deployment.publish()
    await deployment.train(deployment.batch())
    saved, expected, out = tmp_path / "run" / "checkpoints" / "step-000001", tmp_path / "expected", tmp_path / "out"
    await deployment.call(TrainerService.SaveCheckpoint, pb.SaveCheckpointRequest(path=str(saved)))
    await deployment.call(TrainerService.ExportHuggingFace, pb.ExportHuggingFaceRequest(path=str(expected)))
    settings = config(CASES[case]).model_dump(mode="json", exclude_defaults=True) | {"loss": {"kind": "sft"}}
    tree = {
        "model": str(deployment.models / "untied"),
        "data": {"train": "not read", "samples_per_step": 2, "max_tokens": 64},
        "trainer": settings | {"num_ranks": 2},
        "num_steps": 1,
    }
    (tmp_path / "run" / "config.json").write_text(json.dumps(tree))
    code, output = await lockstep("export", saved, "--out", out, "--dtype", "float32")
    assert code == 0, output
    for directory in ("", "adapter") if "adapters" in case else ("",):
        wanted, written = tensors(expected / directory), tensors(out / directory)
        assert wanted.keys() == written.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(written[name], tensor, rtol=0, atol=1e-6, msg=name)
    start = tensors(deployment.models / "untied")
    assert any(not torch.equal(start[name], tensor) for name, tensor in tensors(out).items())  # it was trained
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype is torch.float32
    assert torch.equal(loaded.state_dict()["lm_head.weight"], tensors(out)["lm_head.weight"])


def make_checkpoint(run: Path, trainer: dict[str, Any]) -> Path:
    """Makes as much of a run's checkpoint as the config of its export depends on; returns its path."""
    checkpoint = run / "checkpoints" / "step-000001"
    (checkpoint / "state").mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    tree = {
        "model": str(run / "model"),
        "data": {"train": "not read", "samples_per_step": 2, "max_tokens": 64},
        "trainer": trainer | {"loss": {"kind": "sft"}},
        "num_steps": 1,
    }
    (run / "config.json").write_text(json.dumps(tree))
    return checkpoint


@pytest.mark.parametrize("resharding", ["fully_reshardable", "dp_reshardable"])
def test_the_export_of_a_run_with_the_flex_dispatcher_needs_none(tmp_path: Path, resharding: str) -> None:
    megatron = {"expert_model_parallel_size": 2, "moe": {"token_dispatcher_type": "flex", "grouped_gemm": False}}
    checkpoint = make_checkpoint(tmp_path, {"strategy": "megatron", "num_ranks": 2, "megatron": megatron})
    (checkpoint / "state" / "layout.json").write_text(json.dumps({"layout": {"resharding": resharding}}))
    megatron = export_config(checkpoint, [], "float32").trainer.megatron
    assert megatron.moe.token_dispatcher_type == "auto"
    assert megatron.moe.grouped_gemm is False  # the rest stays


@pytest.mark.parametrize(
    ("content", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"dtype": "float32", "text_config": {"dtype": "bfloat16"}}, "float32"),
        ({"torch_dtype": "float32", "text_config": {"dtype": "bfloat16"}}, "float32"),
        ({}, "float32"),
    ],
)
def test_the_export_has_the_dtype_of_the_starting_model(tmp_path: Path, content: dict[str, Any], dtype: str) -> None:
    checkpoint = make_checkpoint(tmp_path, {})
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(content))
    assert export_config(checkpoint, [], "auto").trainer.compute_dtype == dtype


def test_an_export_serves_no_metrics(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    config = export_config(make_checkpoint(tmp_path, {}), ["observability.metrics_address=127.0.0.1:9100"], "auto")
    assert config.observability.metrics_address == ""


async def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    saved = tmp_path / "checkpoints" / "step-000003"
    saved.mkdir(parents=True)
    (saved / "manifest.json").touch()
    for wrong in (tmp_path, saved.parent, saved.with_name("step-000001")):  # the last one was deleted
        code, output = await lockstep("export", wrong, "--out", tmp_path / "out")
        words = f"{wrong} has no manifest.json; give one of the run's checkpoints: {saved}"
        assert (code, words in output) == (2, True), output
    (tmp_path / "unsaved").mkdir()
    (tmp_path / "unsaved" / LEDGER).touch()
    code, output = await lockstep("export", tmp_path / "unsaved", "--out", tmp_path / "out")
    assert (code, "this run has no checkpoints: checkpoint.save_freq makes them" in output) == (2, True), output
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "manifest.json").write_text("{}")
    code, output = await lockstep("export", tmp_path / "elsewhere", "--out", tmp_path / "out")
    assert (code, "give the config of the run as well" in output) == (2, True), output
