"""Tests that a run deletes old batches if told to, can be resumed from each checkpoint, and verifies."""

import itertools
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from services.common.config.evaluation import BestConfig
from services.common.config.operation import CheckpointConfig
from services.common.config.run import Config
from services.common.errors import NotFound
from services.coordinator.cli.main import app
from services.coordinator.replay.record import Record
from services.coordinator.runs.ledger import LEDGER, Kind, Ledger
from services.coordinator.runs.reader import METRICS, metrics_lines
from services.coordinator.runs.record import batch_path, batches_before, calls_path
from services.coordinator.verify.samples import SampleChecks
from services.coordinator.verify.session import verify
from tests.coordinator.runs.killing import make_run, surviving_services

NUM_STEPS = 5


def run_config(directory: Path, num_batches: int, num_checkpoints: int) -> Config:
    config = make_run(directory, NUM_STEPS)
    kept = {"max_ckpts_to_keep": num_checkpoints, "max_batches_to_keep": num_batches}
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update=kept)})


def batches(run_dir: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step-")) for path in (run_dir / "batches").iterdir())


@pytest.mark.parametrize(
    ("num_batches", "num_checkpoints", "kept"),
    [(1, 1, [4]), (3, 1, [2, 3, 4]), (1, 3, [3, 4]), (9, 1, [0, 1, 2, 3, 4])],
)
async def test_the_newest_batches_and_those_that_a_resume_needs_are_kept(
    num_batches: int, num_checkpoints: int, kept: list[int], tmp_path: Path
):
    config = run_config(tmp_path, num_batches, num_checkpoints)
    async with surviving_services() as services:
        await services.run(config)
    assert batches(config.run_dir) == kept
    verdict = verify(config.run_dir)
    assert (verdict.violation, verdict.num_deleted) == ("", NUM_STEPS - len(kept))


async def test_a_run_without_its_old_batches_goes_on_and_replays_those_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = run_config(tmp_path, 1, 2)
    async with surviving_services() as services:
        await services.run(config)
        with closing(Record(config.run_dir)) as record:
            assert record.batch(NUM_STEPS).samples.num_rows
            with pytest.raises(NotFound, match="were not kept"):
                record.batch(1)
        older = config.run_dir / "checkpoints" / "step-000004"
        await services.run(config.model_copy(update={"resume": str(older), "num_steps": NUM_STEPS + 1}))
    assert verify(config.run_dir).violation == ""
    printed = CliRunner().invoke(app, ["verify", str(config.run_dir)]).output.replace("\n", " ")
    assert f"no violation; the batches of {verify(config.run_dir).num_deleted} steps were deleted" in printed
    check = SampleChecks.check

    def delete_and_check(self: SampleChecks, path: Path, *facts: Any) -> Iterator[str]:
        path.unlink()
        return check(self, path, *facts)

    with monkeypatch.context() as patch:  # as if the run had deleted it while it is read
        patch.setattr(SampleChecks, "check", delete_and_check)
        assert "is missing" in verify(config.run_dir).violation
    batch_path(config.run_dir, NUM_STEPS).unlink(missing_ok=True)  # not by the run
    assert "is missing" in verify(config.run_dir).violation


async def test_a_run_that_is_faster_than_verify_reads_has_no_violation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = make_run(tmp_path, NUM_STEPS)
    async with surviving_services() as services:
        await services.run(config)
    check, steps = SampleChecks.check, itertools.count(NUM_STEPS + 1)

    def check_while_the_run_goes_on(self: SampleChecks, path: Path, version: int, *facts: Any) -> Iterator[str]:
        """The run finishes a step and deletes the batch while it is read."""
        step, metrics = next(steps), {"time/step_s": 1.0}
        with (config.run_dir / METRICS).open("a") as lines:
            lines.write(json.dumps({"step": step, **metrics}) + "\n")
        ledger.record(Kind.FINISHED, step, **metrics)
        ledger.record(Kind.DELETED_BATCHES, version + 1)
        path.unlink()
        return check(self, path, version, *facts)

    monkeypatch.setattr(SampleChecks, "check", check_while_the_run_goes_on)
    with closing(Ledger(config.run_dir / LEDGER)) as ledger:
        verdict = verify(config.run_dir)
    assert (verdict.violation, verdict.num_deleted) == ("", NUM_STEPS)


async def test_the_newest_evaluations_are_kept_and_the_metrics_of_all(tmp_path: Path):
    config = make_run(tmp_path, NUM_STEPS)
    kept = config.checkpoint.model_copy(update={"max_evaluations_to_keep": 2})
    config = config.model_copy(update={"checkpoint": kept})
    async with surviving_services() as services:
        await services.run(config)
    evaluated = [line.step for line in metrics_lines(config.run_dir / METRICS) if not line.is_step]
    held = sorted(path.name for path in (config.run_dir / "evaluations").iterdir())
    names = [f"test-step-{step:06d}.parquet" for step in evaluated]
    # One more is there if the last evaluation ended after the last checkpoint was saved.
    assert held in (names[-2:], names[-3:]) and len(names) > 3
    assert verify(config.run_dir).violation == ""
    (config.run_dir / "evaluations" / held[0]).unlink()  # not by the run
    assert "is missing" in verify(config.run_dir).violation


async def test_with_a_lag_the_best_checkpoint_keeps_what_was_sampled_before_it(tmp_path: Path):
    lagged = {"lag": {"versions": 1}, "loss": {"old_logprobs": "engine", "clip_dual": 3.0}}
    config = make_run(tmp_path, NUM_STEPS, trainer=lagged)
    kept = {"max_ckpts_to_keep": 1, "max_batches_to_keep": 1, "keep_best": BestConfig(metric="eval/test/reward")}
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update=kept)})
    async with surviving_services() as services:
        await services.run(config)
        best, newest = sorted((config.run_dir / "checkpoints").iterdir())
        assert (best.name, newest.name) == ("step-000001", f"step-{NUM_STEPS:06d}")  # all rewards are equal
        assert batches(config.run_dir) == [1, NUM_STEPS - 1]
        assert (verify(config.run_dir).violation, verify(config.run_dir).num_deleted) == ("", NUM_STEPS - 2)
        await services.run(config.model_copy(update={"resume": str(best), "num_steps": NUM_STEPS + 1}))
    assert verify(config.run_dir).violation == ""


def test_the_calls_of_a_batch_are_deleted_with_it(tmp_path: Path):
    (tmp_path / "batches").mkdir()
    for version in (2, 10, 1_000_001):
        for path in (batch_path(tmp_path, version), calls_path(tmp_path, version)):
            path.touch()
    (tmp_path / "batches" / "step-mine.parquet").touch()
    assert set(batches_before(tmp_path, 1_000_001)) == {
        of(tmp_path, version) for of in (batch_path, calls_path) for version in (2, 10)
    }


@pytest.mark.parametrize("name", ["max_batches_to_keep", "max_evaluations_to_keep"])
def test_without_checkpoints_nothing_would_be_deleted(name: str):
    with pytest.raises(ValidationError, match=f"{name} .*set save_freq above 0"):
        CheckpointConfig.model_validate({name: 1})
