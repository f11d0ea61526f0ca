"""Tests that checkpoints are saved in the background, one at a time, and recorded once complete."""

import asyncio
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.config.operation import CheckpointConfig
from services.common.errors import InternalError, PreconditionFailed, Reason
from services.coordinator.observe.reporters import JsonLines
from services.coordinator.rl.step import Batch, update
from services.coordinator.runs.checkpoints import Checkpoints
from services.coordinator.runs.ledger import Kind, Ledger
from services.coordinator.runs.resume import open_run
from services.coordinator.runs.run import Run
from tests.coordinator.fake_services import make_config
from tests.support import raises, until

DIRECTORIES = ("critic_checkpoints", "checkpoints")
MANIFEST = b'{"state": {"version": 0}}'


class FakeTrainer:
    """Completes or fails a save when the test says so."""

    def __init__(self, name: str = "trainer") -> None:
        self.name = name
        self.saving: list[int] = []
        self.trained: list[int] = []
        self.ends: asyncio.Queue[Exception | None] = asyncio.Queue()
        self.is_elsewhere, self.manifest = False, MANIFEST

    async def save(self, path: str, version: int) -> str:
        self.saving.append(version)
        error = await self.ends.get()
        if error is not None:
            raise error
        if not self.is_elsewhere:
            Path(path).mkdir(parents=True)
            Path(path, "manifest.json").write_bytes(self.manifest)
        return hashlib.sha256(MANIFEST).hexdigest()

    async def train(
        self, batch: object, batch_id: str, stamp: PolicyStamp, *_: object, **drawn: object
    ) -> tuple[int, dict[str, float]]:
        self.trained.append(stamp.version)
        return stamp.version + 1, {}


@pytest.fixture
def open_again(tmp_path: Path) -> Iterator[Callable[[], Run]]:
    """Provides a function that opens the run, which may be called again after the run was closed."""
    config = make_config(name="run", runs_dir=tmp_path, checkpoint={"save_freq": 1, "max_ckpts_to_keep": 2})
    runs: list[Run] = []

    def opening() -> Run:
        runs.append(Run(config, open_run(config)))
        return runs[-1]

    yield opening
    runs[-1].close()


def recorded(run: Run, kind: Kind) -> list[str]:
    return [Path(row["path"]).name for row in run.record.ledger.all(kind)]


async def test_the_run_goes_on_and_the_next_checkpoint_waits(open_again: Callable[[], Run]) -> None:
    run, trainer = open_again(), FakeTrainer()
    await run.checkpoints.begin([trainer], 1)  # returns although the save hangs
    second = asyncio.create_task(run.checkpoints.begin([trainer], 2))
    await until(lambda: trainer.saving)
    run.checkpoints.check()
    assert not second.done() and trainer.saving == [1] and recorded(run, Kind.SAVED) == []
    trainer.ends.put_nowait(None)
    await second
    assert recorded(run, Kind.SAVED) == ["step-000001"]
    trainer.ends.put_nowait(None)
    trainer.ends.put_nowait(None)
    await run.checkpoints.begin([trainer], 3)
    assert recorded(run, Kind.DELETED) == []  # the third is not complete yet
    await run.checkpoints.finish()
    assert recorded(run, Kind.SAVED) == ["step-000001", "step-000002", "step-000003"]
    assert recorded(run, Kind.DELETED) == ["step-000001"]
    assert sorted(path.name for path in (run.config.run_dir / "checkpoints").iterdir()) == [
        "step-000002",
        "step-000003",
    ]


async def test_an_old_checkpoint_that_cannot_be_deleted_is_named(
    open_again: Callable[[], Run], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, trainer = open_again(), FakeTrainer()
    monkeypatch.setattr(shutil, "rmtree", lambda path, ignore_errors: None)  # as of files that are immutable
    for version in (1, 2, 3):
        trainer.ends.put_nowait(None)
        await run.checkpoints.begin([trainer], version)
        await run.checkpoints.finish()
    assert recorded(run, Kind.DELETED) == ["step-000001"]
    assert [message for message in caplog.messages if "step-000001 is no longer a checkpoint" in message]


async def test_of_a_critic_the_newest_is_kept_and_saved_before_the_policy(open_again: Callable[[], Run]) -> None:
    run, critic, trainer = open_again(), FakeTrainer("critic"), FakeTrainer()
    for version in (1, 2, 3):
        for model in (critic, trainer):
            model.ends.put_nowait(None)
        await run.checkpoints.begin([critic, trainer], version)
        await run.checkpoints.finish()
    assert recorded(run, Kind.SAVED_CRITIC) == ["step-000001", "step-000002", "step-000003"]
    kept = {name: sorted(path.name for path in (run.config.run_dir / name).iterdir()) for name in DIRECTORIES}
    assert kept == {"critic_checkpoints": ["step-000003"], "checkpoints": ["step-000002", "step-000003"]}


async def test_evaluations_of_a_branch_that_is_left_are_deleted_first(tmp_path: Path) -> None:
    ledger, trainer = Ledger(tmp_path / "ledger.sqlite"), FakeTrainer()
    checkpoints = Checkpoints(tmp_path, ledger, CheckpointConfig(save_freq=1, max_evaluations_to_keep=2))
    (tmp_path / "evaluations").mkdir()
    for step in (2, 4, 6, 8, 5):  # it goes back from step 8 to step 4
        if step == 5:
            ledger.record(Kind.BEGUN, 4)
        ledger.record(Kind.FINISHED, step, metrics={})
        (tmp_path / "evaluations" / f"test-step-{step}").touch()
        ledger.record(Kind.EVAL_SAMPLES, step, file=f"test-step-{step}", sha256="")
    trainer.ends.put_nowait(None)
    await checkpoints.begin([trainer], 5)
    await checkpoints.finish()
    assert sorted(path.name for path in (tmp_path / "evaluations").iterdir()) == ["test-step-4", "test-step-5"]
    ledger.close()


async def test_a_branch_that_is_left_keeps_policy_and_critic_by_one_name(open_again: Callable[[], Run]) -> None:
    run, critic, trainer = open_again(), FakeTrainer("critic"), FakeTrainer()
    for model in (critic, trainer):
        model.ends.put_nowait(None)
    await run.checkpoints.begin([critic, trainer], 2)
    await run.checkpoints.finish()
    run.checkpoints.leave_later(1)
    left = [[path.name for path in (run.config.run_dir / name).iterdir()] for name in DIRECTORIES]
    assert left[0] == left[1]
    assert [name.endswith("-step-000002") for name in left[0]] == [True]


async def test_a_critic_whose_policy_was_not_saved_is_replaced(open_again: Callable[[], Run]) -> None:
    run, critic, trainer = open_again(), FakeTrainer("critic"), FakeTrainer()
    critic.ends.put_nowait(None)
    await run.checkpoints.begin([critic, trainer], 2)
    await until(lambda: trainer.saving)
    run.checkpoints.abandon()
    run.close()
    run, trainer = open_again(), FakeTrainer()
    run.checkpoints.leave_later(1)
    for model in (critic, trainer):
        model.ends.put_nowait(None)
    await run.checkpoints.begin([critic, trainer], 2)
    await run.checkpoints.finish()
    assert critic.saving == [2, 2]
    assert [[path.name for path in (run.config.run_dir / name).iterdir()] for name in DIRECTORIES] == [
        ["step-000002"],
        ["step-000002"],
    ]


async def test_neither_model_is_trained_before_the_policy_is_saved_too(open_again: Callable[[], Run]) -> None:
    run, critic, trainer = open_again(), FakeTrainer("critic"), FakeTrainer()
    await run.checkpoints.begin([critic, trainer], 1)
    stamp, context = PolicyStamp(version=1, digest="d"), SimpleNamespace(trainer=trainer, critic=critic)
    updating = asyncio.create_task(update(run, context, Batch(pa.table({}), stamp), stamp))
    critic.ends.put_nowait(None)
    await until(lambda: trainer.saving)
    assert trainer.trained == []
    trainer.ends.put_nowait(None)
    assert await updating == (2, {})
    assert recorded(run, Kind.SAVED) == ["step-000001"] and trainer.trained == [1]


async def test_a_run_that_is_stopped_is_saved_where_it_is(open_again: Callable[[], Run]) -> None:
    run, trainer = open_again(), FakeTrainer()
    run.begin(3, [])
    run.config.__dict__["checkpoint"] = CheckpointConfig(save_freq=2)
    await run.end_checkpoints([trainer])
    assert trainer.saving == []  # it was not stopped
    run.stopping = True
    trainer.ends.put_nowait(None)
    await run.end_checkpoints([trainer])
    assert recorded(run, Kind.SAVED) == ["step-000003"]


async def test_the_critics_last_checkpoint_outlives_a_save_that_fails(open_again: Callable[[], Run]) -> None:
    run, critic, trainer = open_again(), FakeTrainer("critic"), FakeTrainer()
    for end in (None, InternalError("disk")):
        critic.ends.put_nowait(None)
        trainer.ends.put_nowait(end)
    await run.checkpoints.begin([critic, trainer], 1)
    with pytest.raises(InternalError):
        await run.checkpoints.begin([critic, trainer], 2)
        await run.checkpoints.finish()
    assert (run.config.run_dir / "critic_checkpoints" / "step-000001").is_dir()


async def test_an_export_of_another_version_is_kept_aside(open_again: Callable[[], Run]) -> None:
    run = open_again()
    path = run.record.export_path
    run.begin(3, [])
    assert not run.record.set_aside_export(run.version)
    path.mkdir()
    run.record.record_export(run.version)
    assert run.record.set_aside_export(run.version)
    run.record.ledger.record(Kind.BEGUN, 2)
    run.record.ledger.record(Kind.FINISHED, 3)  # with other weights
    assert not run.record.set_aside_export(run.version)
    path.mkdir()
    run.record.record_export(run.version)
    assert run.record.set_aside_export(run.version)
    run.begin(6, [])
    assert not run.record.set_aside_export(run.version)
    assert [old.name.rpartition("-")[0] for old in path.parent.glob("model-*")] == ["model-3", "model-3"]


async def test_other_training_data_is_refused(open_again: Callable[[], Run]) -> None:
    run = open_again()
    run.record.require_same_data("digest")
    run.record.ledger.record(Kind.COLLECTED, 0, dataset="digest", digest="d", sha256="s")
    run.record.require_same_data("digest")
    with pytest.raises(PreconditionFailed, match=r"data\.train differs from what"):
        run.record.require_same_data("other")


async def test_other_held_out_data_is_refused_once_it_counts(open_again: Callable[[], Run]) -> None:
    record = open_again().record
    record.use_data("train", {"data.eval.a": "1" * 32, "data.eval.b": "2" * 32})
    changed = {"data.eval.a": "3" * 32, "data.eval.b": "2" * 32}
    record.use_data("train", changed)  # nothing was evaluated
    record.ledger.record(Kind.EVALUATED, 0, **{"eval/a/reward/mean": 0.5})
    record.require_same_data("train", changed)
    with pytest.raises(PreconditionFailed, match=r"data\.eval\.a differs from what .* 33333333 is now 44444444\)"):
        record.require_same_data("train", changed | {"data.eval.a": "4" * 32})
    record.ledger.record(Kind.COLLECTED, 0, dataset="train", digest="d", sha256="s")
    with pytest.raises(PreconditionFailed, match=r"^data\.train and data\.eval\.a differ from what"):
        record.require_same_data("other", changed | {"data.eval.a": "4" * 32})


async def test_an_error_is_raised_when_the_loop_looks(open_again: Callable[[], Run]) -> None:
    run, trainer = open_again(), FakeTrainer()
    trainer.ends.put_nowait(InternalError("disk"))
    await run.checkpoints.begin([trainer], 1)
    with pytest.raises(InternalError, match="disk"):
        await run.checkpoints.finish()
    with pytest.raises(InternalError, match="disk"):
        run.checkpoints.check()
    assert recorded(run, Kind.SAVED) == []


@pytest.mark.parametrize(
    ("change", "why"), [({"is_elsewhere": True}, "cannot be read: No such"), ({"manifest": b"[]"}, "is another one")]
)
async def test_a_checkpoint_that_is_not_seen_here_ends_the_run(
    open_again: Callable[[], Run], change: dict[str, Any], why: str
) -> None:
    """The trainer's host has another file system at the run's path, so nothing could be resumed."""
    run, trainer = open_again(), FakeTrainer()
    vars(trainer).update(change)
    trainer.ends.put_nowait(None)
    await run.checkpoints.begin([trainer], 1)
    with raises(PreconditionFailed, reason=Reason.STORAGE_FAILED, field="runs_dir") as caught:
        await run.checkpoints.finish()
    manifest = run.config.run_dir / "checkpoints" / "step-000001" / "manifest.json"
    assert f"is at {manifest} on the trainer's host" in caught.value.message
    assert f"{manifest} {why}" in caught.value.message
    assert recorded(run, Kind.SAVED) == []


async def test_a_run_that_ends_early_records_nothing_and_saves_again(open_again: Callable[[], Run]) -> None:
    run, trainer = open_again(), FakeTrainer()
    await run.checkpoints.begin([trainer], 1)
    await until(lambda: trainer.saving)
    run.close()
    # The trainer continues: the checkpoint is complete, but the ledger does not have it.
    path = run.config.run_dir / "checkpoints" / "step-000001"
    path.mkdir(parents=True)
    again, trainer = open_again(), FakeTrainer()
    assert again.resume_from == ""
    trainer.ends.put_nowait(None)
    await again.checkpoints.begin([trainer], 1)
    await again.checkpoints.finish()
    assert recorded(again, Kind.SAVED) == ["step-000001"] and path.is_dir()


async def test_a_checkpoint_that_only_the_trainer_knows_of_is_recorded(open_again: Callable[[], Run]) -> None:
    """The trainer completes such a checkpoint, and trains on, after the coordinator has ended."""
    run = open_again()
    run.begin(0, ())
    for version in (1, 2):
        run.finish_step(version, {})
    path = run.config.run_dir / "checkpoints" / "step-000001"
    path.mkdir(parents=True)
    state = {"version": 1, "last_batch_id": f"{run.run_id}/0"}
    for batch_id in ("other/0", state["last_batch_id"]):
        assert recorded(run, Kind.SAVED) == []
        (path / "manifest.json").write_text(json.dumps({"state": state | {"last_batch_id": batch_id}}))
        run.adopt_checkpoint(2)
    run.adopt_checkpoint(2)
    assert recorded(run, Kind.SAVED) == ["step-000001"]
    run.close()
    assert open_again().resume_from == str(path.absolute())


@pytest.mark.parametrize("is_copied", [False, True], ids=["moved", "copied"])
async def test_a_run_that_was_moved_or_copied_has_its_own_checkpoints(tmp_path: Path, is_copied: bool) -> None:
    async def go_on(runs_dir: Path, versions: range) -> str:
        config = make_config(name="run", runs_dir=runs_dir, checkpoint={"save_freq": 1, "max_ckpts_to_keep": 2})
        run, trainer = Run(config, open_run(config)), FakeTrainer()
        for version in versions:
            trainer.ends.put_nowait(None)
            await run.checkpoints.begin([trainer], version)
            await run.checkpoints.finish()
        run.close()
        return run.resume_from

    before, now = tmp_path / "before", tmp_path / "now"
    await go_on(before, range(1, 3))
    shutil.copytree(before, now) if is_copied else before.rename(now)
    assert await go_on(now, range(3, 5)) == str(now / "run" / "checkpoints" / "step-000002")
    assert await go_on(now, range(0)) == str(now / "run" / "checkpoints" / "step-000004")
    saved = {runs_dir: sorted(path.name for path in runs_dir.glob("run/checkpoints/*")) for runs_dir in (before, now)}
    assert saved[now] == ["step-000003", "step-000004"]
    assert saved[before] == (["step-000001", "step-000002"] if is_copied else [])


@pytest.mark.parametrize(
    ("resume", "refused", "held"), [("auto", [1], [2, 3]), ("checkpoints/step-000001", [0, 2], [1])], ids=["on", "back"]
)
async def test_what_a_trainer_has_kept_is_where_the_run_goes_on(
    tmp_path: Path, resume: str, refused: list[int], held: list[int]
) -> None:
    config = make_config(name="run", runs_dir=tmp_path)
    with closing(Run(config, open_run(config))) as run:
        for version in (1, 2):
            path = run.config.run_dir / "checkpoints" / f"step-{version:06d}"
            path.mkdir(parents=True)
            content = json.dumps({"state": {"version": version}}).encode()
            (path / "manifest.json").write_bytes(content)
            digest = hashlib.sha256(content).hexdigest()
            run.record.ledger.record(Kind.SAVED, version, path=str(path), manifest_digest=digest)
    named = resume if resume == "auto" else str(config.run_dir / resume)
    config = config.model_copy(update={"resume": named})
    with closing(Run(config, open_run(config))) as run:
        for version in refused:
            with raises(PreconditionFailed, field="resume"):
                run.require_held(version)
        for version in held:
            run.require_held(version)


def test_an_evaluation_of_a_branch_that_was_left_does_not_come_back(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        for step in (1, 2):
            ledger.record(Kind.FINISHED, step, **{"reward/mean": 0.1})
            ledger.record(Kind.EVALUATED, step, **{"eval/test/reward": 0.1})
        ledger.record(Kind.BEGUN, 1)
        assert [row["version"] for row in ledger.evaluations()] == [1]
        ledger.record(Kind.FINISHED, 2, **{"reward/mean": 0.2})  # and evaluates less often from here on
        assert [row["version"] for row in ledger.evaluations()] == [1]
        JsonLines(path, 2, ledger).close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [
        {"step": 1, "reward/mean": 0.1},
        {"step": 1, "eval/test/reward": 0.1},
        {"step": 2, "reward/mean": 0.2},
    ]
