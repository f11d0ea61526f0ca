"""Tests that `lockstep doctor` compares the disk with what a run keeps on it."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.coordinator.doctor import host
from services.coordinator.planning.memory import trained_parameters
from services.coordinator.planning.plan import planned_model
from tests.coordinator.doctor.findings import FAIL, OK, WARN, assert_fails, config_with

GIB = 1 << 30


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"free": 100 * GIB}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(**free))
    config = config_with(runs_dir=tmp_path / "not" / "yet", checkpoint={"save_freq": 1, "max_ckpts_to_keep": 3})
    assert str(tmp_path) in host.check_disk(config).result
    for verdict, left in ((OK, 100 * GIB), (WARN, 5 * GIB), (FAIL, GIB // 2)):
        free["free"] = left
        assert host.check_disk(None).verdict is host.check_disk(config).verdict is verdict
    # Four checkpoints and an export of a model of 8 GiB of parameters.
    monkeypatch.setattr(host, "planned_model", lambda config: SimpleNamespace(num_parameters=8 * GIB))
    free["free"] = 8 * (4 * 14 + 4) * GIB - 1
    assert_fails(host.check_disk(config), FAIL, "the run needs 480.00", "max_ckpts_to_keep")
    free["free"] = 2 * 8 * (4 * 14 + 4) * GIB
    assert host.check_disk(config).verdict is OK
    # With the best one kept, five; and three of a critic of the same size.
    kept = {"save_freq": 1, "max_ckpts_to_keep": 3, "keep_best": {"metric": "eval/test/reward"}}
    critic = {"advantage": {"kind": "gae"}, "critic": {}}
    data = {"train": "x.jsonl", "prompts_per_step": 8, "eval": {"test": "e.jsonl"}}
    config = config_with(checkpoint=kept, evaluation={"eval_freq": 1}, data=data, **critic)
    assert_fails(host.check_disk(config), WARN, f"the run needs {8 * (8 * 14 + 4)}.00", "max_ckpts_to_keep")
    # Of adapters of rank 1, a checkpoint is small; the export is the whole model of 35,000 parameters.
    monkeypatch.setattr(host, "planned_model", planned_model)
    config = config_with(checkpoint={"save_freq": 1}, trainer={"lora": {"rank": 1}})
    model = planned_model(config)
    adapters = trained_parameters(config.trainer, model)
    assert 0 < adapters < model.num_parameters / 10
    assert host.bytes_needed(config) == 4 * 14 * adapters + 4 * model.num_parameters
    monkeypatch.undo()
    assert "not known" in host.check_disk(config_with().model_copy(update={"model": "elsewhere"})).result
