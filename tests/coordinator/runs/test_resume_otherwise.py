"""Tests runs that resume with other functions of the user, or begin at a checkpoint of another run."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from services.common.errors import DataLoss, InvalidInput, NotFound, PreconditionFailed
from services.coordinator.fleet.opening import outcome_if_finished
from services.coordinator.runs.resume import check_resume, open_run
from services.coordinator.runs.run import Run
from tests.coordinator.fake_services import make_config
from tests.coordinator.runs.test_resume import begin, publish, save
from tests.support import raises


def test_another_version_of_an_own_function_is_named_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    own = {"advantage": {"kind": "python", "import_path": "own_rules:advantages"}}
    Path("own_rules.py").write_text("def advantages(samples, config): ...\n")
    begin(tmp_path, **own)
    publish(tmp_path)
    begin(tmp_path, **own)
    assert not caplog.messages
    Path("own_rules.py").write_text("def advantages(samples, config): return 1\n")
    begin(tmp_path, **own)
    assert [message.partition(":")[0] for message in caplog.messages] == ["advantage.import_path"]


def test_a_fork_needs_a_step_after_its_checkpoint(tmp_path: Path):
    begin(tmp_path)
    checkpoint = str(save(tmp_path, 3))
    for num_steps in (2, 3):
        config = make_config(runs_dir=tmp_path, resume=checkpoint, num_steps=num_steps, name=f"fork-{num_steps}")
        with raises(InvalidInput, field="num_steps"):
            check_resume(config)
        with closing(Run(config, open_run(config))) as run, raises(InvalidInput, field="num_steps"):
            outcome_if_finished(run, print)
    check_resume(make_config(runs_dir=tmp_path, resume=checkpoint, num_steps=4, name="fork"))


@pytest.mark.parametrize(
    ("field", "saved", "now"),
    [
        ("strategy", {"strategy": "fsdp", "lora.rank": 0}, {"strategy": "megatron"}),
        ("lora.rank", {"strategy": "fsdp", "lora.rank": 0}, {"lora": {"rank": 4}}),
        ("lora.alpha", {"strategy": "fsdp", "lora.rank": 4, "lora.alpha": 8.0}, {"lora": {"rank": 4, "alpha": 4.0}}),
    ],
)
def test_a_fork_of_another_model_is_refused_before(tmp_path: Path, field: str, saved: dict, now: dict):
    begin(tmp_path)
    checkpoint = save(tmp_path, 3)
    state = {"version": 3, "made_with": saved | {"model/config.json": "d"}}
    (checkpoint / "manifest.json").write_text(json.dumps({"state": state}))
    forked = {"runs_dir": tmp_path, "resume": str(checkpoint), "num_steps": 9, "name": "fork"}
    for check in (check_resume, open_run):
        with raises(PreconditionFailed, field=field):
            check(make_config(trainer=now, **forked))
    if not saved["lora.rank"]:
        check_resume(make_config(**forked))


@pytest.mark.parametrize("name", ["run", "fork"])
def test_a_checkpoint_without_its_critic_is_known_before(tmp_path: Path, name: str):
    with_critic = {"advantage": {"kind": "gae"}, "critic": {}}
    begin(tmp_path, **with_critic)
    older, newer = save(tmp_path, 2), save(tmp_path, 4)
    of_critic = tmp_path / "run" / "critic_checkpoints" / newer.name
    of_critic.mkdir(parents=True)
    (of_critic / "manifest.json").write_text('{"state": {"version": 4}}')
    check_resume(make_config(runs_dir=tmp_path, resume=str(newer), num_steps=9, name=name, **with_critic))
    config = make_config(runs_dir=tmp_path, resume=str(older), num_steps=9, name=name, **with_critic)
    with raises(NotFound, field="resume"):
        check_resume(config)
    with raises(NotFound, field="resume"):
        open_run(config)


def test_a_fork_has_the_warm_up_of_its_critic(tmp_path: Path):
    begin(tmp_path, advantage={"kind": "gae"}, critic={"warmup_steps": 1})
    checkpoint = save(tmp_path, 4)
    of_critic = tmp_path / "run" / "critic_checkpoints" / checkpoint.name
    of_critic.mkdir(parents=True)
    (of_critic / "manifest.json").write_text('{"state": {"version": 5}}')

    def check(warmup_steps: int) -> None:
        with_critic = {"advantage": {"kind": "gae"}, "critic": {"warmup_steps": warmup_steps}}
        check_resume(make_config(runs_dir=tmp_path, resume=str(checkpoint), num_steps=9, name="fork", **with_critic))

    check(1)
    for other in (0, 2):
        with raises(InvalidInput, field="critic.warmup_steps"):
            check(other)


def test_a_lost_checkpoint_is_known_before(tmp_path: Path):
    begin(tmp_path)
    (save(tmp_path, 2) / "manifest.json").unlink()
    with pytest.raises(DataLoss, match="is missing"):
        check_resume(make_config(runs_dir=tmp_path))
