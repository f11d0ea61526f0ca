"""Tests that the ledger keeps all decisions of one coordinator at a time, and that a run never restarts silently."""

import hashlib
import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from services.common.config.run import Config
from services.common.errors import DataLoss, InvalidInput, LockstepError, NotFound, PreconditionFailed
from services.coordinator.runs.ledger import Kind, Ledger
from services.coordinator.runs.resume import Start, check_resume, open_run
from services.coordinator.runs.run import Run
from tests.coordinator.fake_services import make_config
from tests.support import raises


def test_the_ledger_keeps_order_and_survives_closing(tmp_path: Path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    first = ledger.record(Kind.EPOCH, num_replicas=2)
    batch = {"digest": "d", "dataset": "e"}
    second = ledger.record(Kind.COLLECTED, 3, sha256="a", **batch)
    third = ledger.record(Kind.COLLECTED, 3, sha256="b", **batch)
    ledger.record(Kind.COLLECTED, 4, sha256="c", **batch)
    assert first < second < third
    ledger.close()
    ledger = Ledger(tmp_path / "ledger.sqlite")
    assert [row["sha256"] for row in ledger.all(Kind.COLLECTED)] == ["a", "b", "c"]
    assert ledger.last(Kind.COLLECTED, 3) == {"version": 3, "sha256": "b", **batch}
    assert ledger.last(Kind.COLLECTED)["version"] == 4
    assert ledger.last(Kind.SAVED) is None
    assert ledger.record(Kind.EPOCH, num_replicas=1) > third  # epochs only increase, also across restarts
    ledger.close()


def test_one_coordinator_at_a_time(tmp_path: Path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    with pytest.raises(PreconditionFailed, match="another coordinator"):
        Ledger(tmp_path / "ledger.sqlite")
    ledger.close()
    Ledger(tmp_path / "ledger.sqlite").close()


def begin(tmp_path: Path, resume: str = "auto", **sections: object) -> Start:
    """Opens and closes the run, like a coordinator that starts and ends."""
    start = open_run(make_config(runs_dir=tmp_path, resume=resume, **sections))
    start.ledger.close()
    return start


def go_back(tmp_path: Path, checkpoint: Path) -> None:
    """Opens the run at `checkpoint` and begins its loop."""
    config = make_config(runs_dir=tmp_path, resume=str(checkpoint))
    with closing(Run(config, open_run(config))) as run:
        run.begin(run.first_version, ())


def save(tmp_path: Path, version: int) -> Path:
    """Writes a checkpoint and records it in the ledger."""
    path = tmp_path / "run" / "checkpoints" / f"step-{version:06d}"
    path.mkdir(parents=True)
    content = json.dumps({"state": {"version": version}}).encode()
    (path / "manifest.json").write_bytes(content)
    ledger = Ledger(tmp_path / "run" / "ledger.sqlite")
    ledger.record(Kind.SAVED, version, path=str(path), manifest_digest=hashlib.sha256(content).hexdigest())
    ledger.close()
    return path


def publish(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "run" / "ledger.sqlite")
    ledger.record(Kind.PUBLISHED, 0, digest="d")
    ledger.close()


def delete(tmp_path: Path, path: Path) -> None:
    ledger = Ledger(tmp_path / "run" / "ledger.sqlite")
    ledger.record(Kind.DELETED, path=str(path))
    ledger.close()


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_new_directory_is_a_new_run(tmp_path: Path, resume: str):
    start = begin(tmp_path, resume)
    assert start.checkpoint == ""
    assert start.run_id.startswith("run-")


@pytest.mark.parametrize("resume", ["auto", "must"])
def test_the_newest_checkpoint_that_was_not_deleted(tmp_path: Path, resume: str):
    first = begin(tmp_path)
    old, new = save(tmp_path, 2), save(tmp_path, 4)
    newest = save(tmp_path, 6)
    delete(tmp_path, newest)
    delete(tmp_path, old)
    again = begin(tmp_path, resume)
    assert (again.run_id, again.checkpoint) == (first.run_id, str(new))


def test_a_checkpoint_that_was_deleted_and_saved_again_is_there(tmp_path: Path):
    begin(tmp_path)
    old = save(tmp_path, 2)
    delete(tmp_path, old)
    shutil.rmtree(old)
    save(tmp_path, 2)
    assert begin(tmp_path, "must").checkpoint == str(old)


def test_never_does_not_touch_what_is_there(tmp_path: Path):
    begin(tmp_path)
    with raises(InvalidInput, field="resume"):
        begin(tmp_path, "never")


def test_must_needs_something_to_resume(tmp_path: Path):
    with raises(NotFound, field="resume"):
        begin(tmp_path, "must")
    assert not (tmp_path / "run").exists()
    begin(tmp_path)
    with raises(NotFound, field="resume"):
        begin(tmp_path, "must")


def test_what_a_run_would_refuse_is_known_before(tmp_path: Path):
    """Tests check_resume, which opens and makes nothing."""

    def check(resume: str) -> None:
        check_resume(make_config(runs_dir=tmp_path, resume=resume))

    check("auto")
    check("never")
    for nothing in ("must", "nowhere"):
        with raises(NotFound, field="resume"):
            check(nothing)
    assert not (tmp_path / "run").exists()
    begin(tmp_path)
    older = save(tmp_path, 2)
    check("must")
    check(str(older))
    with raises(InvalidInput, field="resume"):
        check("never")
    with raises(NotFound, field="resume"):
        check(str(tmp_path / "nowhere"))
    begin(tmp_path, str(older))
    publish(tmp_path)
    save(tmp_path, 4)
    delete(tmp_path, older)
    (older / "manifest.json").unlink()
    check(str(older))  # the run goes on from step 4, as with the same command


def test_a_path_is_that_checkpoint_or_an_error(tmp_path: Path):
    begin(tmp_path)
    older, newer = save(tmp_path, 2), save(tmp_path, 4)
    assert begin(tmp_path, str(older)).checkpoint == str(older)
    assert begin(tmp_path).checkpoint == str(newer)  # the loop had not begun
    go_back(tmp_path, older)
    # The checkpoint of the branch that was left still exists, but the run does not resume from it.
    assert begin(tmp_path).checkpoint == str(older)
    (left,) = (tmp_path / "run" / "checkpoints").glob("left-*-step-000004")
    assert (left / "manifest.json").is_file()
    with raises(NotFound, field="resume"):
        begin(tmp_path, str(tmp_path / "nowhere"))
    (older / "manifest.json").write_text("{}")
    with pytest.raises(DataLoss, match=r"manifest\.json is damaged"):
        begin(tmp_path, str(older))


@pytest.mark.parametrize("resume", ["auto", "must"])
def test_a_lost_or_changed_checkpoint_is_never_a_fresh_start(tmp_path: Path, resume: str):
    begin(tmp_path)
    manifest = save(tmp_path, 2) / "manifest.json"
    manifest.write_bytes(b"another")
    with pytest.raises(DataLoss, match="not the file that was saved"):
        begin(tmp_path, resume)
    manifest.unlink()
    with pytest.raises(DataLoss, match="is missing"):
        begin(tmp_path, resume)


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"seed": 1}, "seed"),
        ({"trainer": {"optim": {"lr": 5e-6}}}, "trainer.optim.lr"),
        ({"data": {"train": "x.parquet", "prompts_per_step": 16}}, "data.prompts_per_step"),
        ({"rollout": {"sampling": {"temperature": 0.5}}}, "rollout.sampling.temperature"),
    ],
)
def test_a_changed_config_is_named(tmp_path: Path, sections: dict, key: str):
    begin(tmp_path, **sections)  # nothing was published, so no service had used the config
    begin(tmp_path)
    publish(tmp_path)
    path = save(tmp_path, 2)
    with pytest.raises(PreconditionFailed, match=f"another {key} .* another name with resume={path} to") as raised:
        begin(tmp_path, **sections)
    assert isinstance(raised.value, LockstepError)
    begin(tmp_path)  # the error left nothing locked or recorded


def test_another_revision_on_the_hub_is_named_and_another_cache_is_not_another_model(tmp_path: Path):
    def models(cache: str, revision: str) -> dict[str, Any]:
        model = f"{cache}/hub/models--owner--a--b.c/snapshots/{revision}"
        return {"model": model, "reference": {"model": model}}

    begin(tmp_path, **models("/home/a", "0123abc"))
    publish(tmp_path)
    begin(tmp_path, **models("/home/b", "0123abc"))
    same = (
        r"another model, reference.model .*config \(model=owner/a--b.c@0123abc reference.model=owner/a--b.c@0123abc: "
    )
    with pytest.raises(PreconditionFailed, match=same):
        begin(tmp_path, **models("/home/a", "4567def"))


@pytest.mark.parametrize("trainer", [{"strategy": "megatron"}, {"lora": {"rank": 8}}, {"optim": {"kind": "muon"}}])
def test_what_a_checkpoint_cannot_be_loaded_with_goes_on_from_an_export(tmp_path: Path, trainer: dict):
    begin(tmp_path)
    publish(tmp_path)
    path = save(tmp_path, 2)
    with pytest.raises(PreconditionFailed, match=f"another trainer.* another name whose model is an export of {path} "):
        begin(tmp_path, trainer=trainer)


def test_a_key_that_the_run_did_not_know_has_its_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before = json.loads(make_config(runs_dir=tmp_path).model_dump_json())
    del before["trainer"]["optim"]["kind"]
    with monkeypatch.context() as earlier:
        earlier.setattr(Config, "model_dump_json", lambda _: json.dumps(before))
        begin(tmp_path)
    publish(tmp_path)
    begin(tmp_path)
    with pytest.raises(PreconditionFailed, match=r"another trainer\.optim\.kind "):
        begin(tmp_path, trainer={"optim": {"kind": "muon"}})


def test_what_does_not_change_the_numbers_may_change(tmp_path: Path):
    begin(tmp_path)
    publish(tmp_path)
    begin(tmp_path, num_steps=7, checkpoint={"save_freq": 3}, timeouts={"info_s": 1}, weights={"timeout_s": 5})
    begin(tmp_path, trainer={"num_ranks": 2, "fsdp": {"reshard_after_forward": False}})
    begin(tmp_path, trainer={"max_tokens_per_microbatch": 4096}, rollout={"engine": {"gpu_memory_utilization": 0.5}})
    with pytest.raises(PreconditionFailed, match=r"another rollout\.engine\.dtype "):
        begin(tmp_path, rollout={"engine": {"dtype": "float16"}})


def test_a_guard_may_change(tmp_path: Path):
    lagged = {"versions": 1, "min_ess": 0.2}
    begin(tmp_path, trainer={"lag": lagged, "loss": {"old_logprobs": "engine"}})
    publish(tmp_path)
    begin(tmp_path, trainer={"lag": {**lagged, "min_ess": 0.05}, "loss": {"old_logprobs": "engine"}})


@pytest.mark.parametrize(
    ("sections", "names"),
    [
        ({"trainer": {"num_ranks": 2}}, "trainer.num_ranks"),
        (
            {"trainer": {"num_ranks": 2, "max_tokens_per_microbatch": 8192}, "weights": {"bucket_bytes": 4096}},
            "trainer.max_tokens_per_microbatch, trainer.num_ranks, weights.bucket_bytes",
        ),
        ({"rollout": {"tensor_parallel_size": 2}}, "rollout.tensor_parallel_size"),
        ({"num_steps": 7, "timeouts": {"info_s": 1}, "trainer": {"optim": {"on_nonfinite": "fail"}}}, ""),
    ],
)
def test_a_change_of_rounding_is_named_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, sections: dict, names: str
):
    begin(tmp_path)
    begin(tmp_path, **sections)  # nothing was published, so nothing was computed with the old values
    begin(tmp_path)
    assert not caplog.messages
    publish(tmp_path)
    begin(tmp_path, **sections)
    warnings = [message for message in caplog.messages if "differ by rounding" in message]
    assert len(warnings) == bool(names)
    assert not names or f" goes on with another {names}: " in warnings[0]
    publish(tmp_path)
    begin(tmp_path, **sections)  # the next session has the same values
    assert len(caplog.messages) == len(warnings)


def test_a_limit_may_be_raised_and_not_lowered(tmp_path: Path):
    def limited(prompt: int, model: int, overlong: str = "drop") -> Start:
        data = {"train": "x.parquet", "prompts_per_step": 8, "max_prompt_tokens": prompt, "overlong": overlong}
        return begin(tmp_path, data=data, rollout={"max_model_len": model, "sampling": {"max_tokens": 64}})

    limited(370, 512, "fail")
    publish(tmp_path)
    limited(450, 600)
    limited(370, 512)  # the raised limits were never used, for example because they let other rows in
    limited(450, 600)
    publish(tmp_path)
    with pytest.raises(PreconditionFailed, match=r"another data\.max_prompt_tokens, rollout\.max_model_len "):
        limited(449, 599)


def test_megatrons_sizes_may_change(tmp_path: Path):
    def sized(**megatron: object) -> Start:
        return begin(tmp_path, trainer={"strategy": "megatron", "num_ranks": 4, "megatron": megatron})

    sized()
    publish(tmp_path)
    sized(tensor_model_parallel_size=2, param_offload=True)
    with pytest.raises(PreconditionFailed, match=r"another trainer\.megatron\.moe\.freeze_router "):
        sized(moe={"freeze_router": True})


@pytest.mark.parametrize("resume", ["auto", "must"])
@pytest.mark.parametrize("loss", ["gone", "empty"])
def test_a_run_that_lost_its_ledger_is_not_started_over(tmp_path: Path, resume: str, loss: str):
    begin(tmp_path)
    publish(tmp_path)
    checkpoint = save(tmp_path, 3)
    for file in (tmp_path / "run").glob("ledger.sqlite*"):
        file.unlink()
    if loss == "empty" or resume == "must":
        (tmp_path / "run" / "ledger.sqlite").touch()
    for _ in range(2):  # an attempt leaves nothing that lets the next one through
        with pytest.raises(DataLoss, match=rf"ledger.sqlite is missing or empty; .* resume={checkpoint} to go on"):
            begin(tmp_path, resume)
    assert checkpoint.is_dir()
    start = begin(tmp_path, resume=str(checkpoint), name="other")
    assert start.checkpoint == str(checkpoint)


def test_a_killed_run_that_lost_its_write_ahead_log_is_not_started_over(tmp_path: Path):
    start = open_run(make_config(runs_dir=tmp_path / "first"))  # never closed, so nothing has left the log
    checkpoint = tmp_path / "first" / "run" / "checkpoints" / "step-000003"
    checkpoint.mkdir(parents=True)
    start.ledger.record(Kind.SAVED, 3, path=str(checkpoint), manifest_digest="d")
    shutil.copytree(tmp_path / "first", tmp_path / "copy", ignore=shutil.ignore_patterns("*-wal", "*-shm"))
    start.ledger.close()
    with pytest.raises(DataLoss, match=r"has checkpoints/step-000003, but its ledger.sqlite is missing or empty"):
        begin(tmp_path / "copy")


def test_batches_alone_are_reason_enough(tmp_path: Path):
    batches = tmp_path / "run" / "batches"
    batches.mkdir(parents=True)
    begin(tmp_path)  # an empty directory is a new run
    for file in (tmp_path / "run").glob("ledger.sqlite*"):
        file.unlink()
    (batches / "step-000000.parquet").touch()
    with pytest.raises(DataLoss, match=r"has batches/step-000000.parquet, but its ledger.sqlite is missing"):
        begin(tmp_path)


def test_the_same_command_goes_on_after_it_went_back(tmp_path: Path):
    begin(tmp_path)
    older = save(tmp_path, 3)
    save(tmp_path, 6)
    command = {"resume": str(older)}
    assert begin(tmp_path, **command).required_step == 3
    assert begin(tmp_path, **command).required_step == 3  # nothing had been done: it still goes back
    go_back(tmp_path, older)
    publish(tmp_path)
    for _ in range(2):  # nothing was saved yet
        again = begin(tmp_path, **command)
        assert (again.checkpoint, again.required_step) == (str(older), None)
    newer = save(tmp_path, 9)
    again = begin(tmp_path, **command)
    assert (again.checkpoint, again.required_step) == (str(newer), None)
    delete(tmp_path, older)  # as older checkpoints are, during the run
    shutil.rmtree(older)
    assert begin(tmp_path, **command).checkpoint == str(newer)
    assert newer.is_dir()


def test_a_run_begun_from_anothers_checkpoint_never_starts_from_the_model(tmp_path: Path):
    begin(tmp_path)
    given = save(tmp_path, 3).rename(tmp_path / "step-000003")
    other = {"runs_dir": tmp_path / "other", "resume": str(given)}
    open_run(make_config(**other)).ledger.close()
    path = tmp_path / "other"
    publish(path)
    for resume in (str(given), "auto", "must"):
        start = open_run(make_config(**other | {"resume": resume}))
        start.ledger.close()
        assert (start.checkpoint, start.required_step) == (str(given), None)
    own = save(path, 4)
    for resume in (str(given), "auto", "must"):
        start = open_run(make_config(**other | {"resume": resume}))
        start.ledger.close()
        assert (start.checkpoint, start.required_step) == (str(own), None)


def test_another_resume_in_between_lets_the_run_go_back_again(tmp_path: Path):
    begin(tmp_path)
    older = save(tmp_path, 3)
    for _ in range(2):
        assert begin(tmp_path, str(older)).required_step == 3
        publish(tmp_path)
        assert begin(tmp_path, "auto").required_step is None
