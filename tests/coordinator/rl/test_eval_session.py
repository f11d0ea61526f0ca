"""Tests the config that `lockstep eval` derives from a run's config and the path of a checkpoint or model."""

import json
from pathlib import Path

import pytest

from services.common.config.run import Config
from services.common.errors import InvalidInput, NotFound
from services.coordinator.rl.evaluation import eval_config, load_config, with_own_config
from services.coordinator.runs.resume import open_run
from tests.coordinator.fake_services import make_config
from tests.support import raises


@pytest.fixture
def config(tmp_path: Path) -> Config:
    data = {"train": "train.parquet", "eval": {"test": "test.parquet"}, "prompts_per_step": 4}
    return make_config(data=data, runs_dir=tmp_path / "runs")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Creates a run's directory with a checkpoint and an exported model."""
    directory = tmp_path / "run"
    (directory / "checkpoints" / "step-000002").mkdir(parents=True)
    (directory / "model").mkdir()
    (directory / "config.json").write_text("{}")
    manifest = directory / "checkpoints" / "step-000002" / "manifest.json"
    manifest.write_text(json.dumps({"state": {"version": 2}}))
    (directory / "model" / "config.json").write_text("{}")
    return directory


def test_a_checkpoint_is_loaded_into_the_runs_model(config: Config, run_dir: Path):
    checkpoint = run_dir / "checkpoints" / "step-000002"
    made = eval_config(config, checkpoint, None)
    assert (made.model, made.resume) == ("m", str(checkpoint))
    assert made.run_dir.parent == config.run_dir
    assert made.run_dir.name.startswith("eval-step-000002-")
    start = open_run(made)
    start.ledger.close()
    assert start.checkpoint == str(checkpoint)
    assert not (run_dir / "ledger.sqlite").exists()


def test_results_of_a_checkpoint_are_with_its_run(config: Config, run_dir: Path):
    checkpoint = run_dir / "checkpoints" / "step-000002"
    other = config.model_copy(update={"name": "of-the-yaml"})
    assert eval_config(other, checkpoint, None).run_dir.parent == other.run_dir  # not a run: no ledger
    (run_dir / "ledger.sqlite").touch()
    assert eval_config(other, checkpoint, None).run_dir.parent == run_dir
    assert eval_config(other, run_dir / "model", None).run_dir.parent == other.run_dir
    assert eval_config(other, checkpoint, run_dir / "mine").run_dir == run_dir / "mine"


def test_a_model_is_taken_in_place_of_the_runs(config: Config, run_dir: Path, tmp_path: Path):
    made = eval_config(config.model_copy(update={"resume": "must"}), run_dir / "model", tmp_path / "out")
    assert (made.model, made.resume, made.run_dir) == (str(run_dir / "model"), "never", tmp_path / "out")
    start = open_run(made)
    start.ledger.close()
    assert start.checkpoint == ""


def test_refusals(config: Config, run_dir: Path, tmp_path: Path):
    with raises(InvalidInput, field="checkpoint"):
        eval_config(config, run_dir, None)
    with raises(NotFound, field="checkpoint"):
        eval_config(config, run_dir / "checkpoints", None)
    with raises(NotFound, field="checkpoint"):
        eval_config(config, tmp_path / "nowhere", None)
    with raises(InvalidInput, field="out"):
        eval_config(config, run_dir / "model", run_dir)
    nothing = config.model_copy(update={"data": config.data.model_copy(update={"eval": {}})})
    with raises(InvalidInput, field="data.eval"):
        eval_config(nothing, run_dir / "model", None)


@pytest.mark.parametrize(
    ("names", "has"),
    [
        (["ledger.sqlite", "checkpoints/step-000002/", "model/"], "checkpoints/step-000002, model"),
        (["ledger.sqlite", "checkpoints/step-000002/"], "checkpoints/step-000002"),
        (["ledger.sqlite", "model/"], "model"),
        (["ledger.sqlite"], "neither: checkpoint.save_freq makes checkpoints"),
    ],
)
def test_a_runs_directory_is_refused_with_what_it_has(config: Config, tmp_path: Path, names: list[str], has: str):
    (tmp_path / "config.json").write_text("{}")
    for name in names:
        path = tmp_path / name
        path.mkdir(parents=True) if name.endswith("/") else path.touch()
    message = f"{tmp_path} is a run's directory: give one of its checkpoints or its model; it has {has}"
    for asked in (lambda: eval_config(config, tmp_path, None), lambda: with_own_config(tmp_path, [])):
        with pytest.raises(InvalidInput) as raised:
            asked()
        assert raised.value.message == message


def test_the_config_is_the_runs_own_unless_a_file_is_given(tmp_path: Path) -> None:
    run_dir, own = tmp_path / "run", str(tmp_path / "run" / "config.json")
    checkpoint, model = run_dir / "checkpoints" / "step-000001", run_dir / "model"
    for directory, name in ((checkpoint, "manifest.json"), (model, "config.json"), (tmp_path, "config.json")):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text("{}")
    with raises(NotFound, field="config"):
        with_own_config(checkpoint, [])
    for name in ("config.json", "ledger.sqlite"):
        (run_dir / name).touch()
    assert with_own_config(checkpoint, ["seed=1"]) == [own, "seed=1"]
    assert with_own_config(model, []) == [own]
    assert with_own_config(checkpoint, ["run.yaml", "seed=1"]) == ["run.yaml", "seed=1"]
    with raises(NotFound, field="checkpoint"):
        with_own_config(tmp_path / "nowhere", [])
    own_of_sft = {"model": "m", "num_steps": 1, "data": {"train": "x", "samples_per_step": 4}}
    (run_dir / "config.json").write_text(json.dumps(own_of_sft))
    with raises(InvalidInput, field="config"):  # the run was a supervised one
        load_config(checkpoint, [], model_is_remote=False)
