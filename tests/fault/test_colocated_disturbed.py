"""Kills colocated processes while the engines sleep: the run goes on, or resumes by itself."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.lockstep_command import (
    LockstepRun,
    assert_gone,
    invoke,
    make_workspace,
    numbers,
    replica_info,
    require_legal,
    weights,
)

NUM_STEPS = 4


def workspace_of(directory: Path, **sections: str) -> Path:
    settings = {"num_steps": NUM_STEPS, "evaluation": {}, "checkpoint": {"save_freq": 2}}
    return make_workspace(directory, placement="colocated", **settings, **sections)


def trainers(run: LockstepRun) -> list[int]:
    return [pid for pid, command in run.below().items() if "services.trainer" in command]


def hold_asleep(run: LockstepRun, address: str, version: int) -> None:
    """Stops the trainer's processes while the engines sleep, after the batch of `version` was collected."""
    run.until(lambda: run.has("collected", version), f"the batch of {version}")
    run.until(lambda: replica_info(address).info.state == "asleep", "the engines to sleep")
    for pid in trainers(run):
        os.kill(pid, signal.SIGSTOP)
    assert replica_info(address).info.state == "asleep", "the trainer was stopped too late"


@pytest.fixture(scope="module")
def with_lost_engine(tmp_path_factory: pytest.TempPathFactory) -> LockstepRun:
    with LockstepRun(workspace_of(tmp_path_factory.mktemp("engine"))) as run:
        run.until(lambda: run.has("published", 0), "the first publication")
        victim, _ = run.services("rollout")
        hold_asleep(run, victim, version=1)
        os.kill(run.services("rollout")[victim], signal.SIGKILL)
        for pid in trainers(run):
            os.kill(pid, signal.SIGCONT)
        run.until(lambda: f"lost replica {victim}:" in run.log, "the loss to be noticed")
        assert run.wait() == 0, run.output
    return run


@pytest.mark.long
def test_a_run_outlives_an_engine_that_dies_asleep(with_lost_engine):
    run = with_lost_engine
    assert [row["num_replicas"] for row in run.ledger("epoch")][:2] == [2, 1]
    steps = [line["step"] for line in numbers(run.workspace) if "reward/mean" in line]
    assert steps == list(range(1, NUM_STEPS + 1))


@pytest.mark.long
def test_a_run_resumes_by_itself_after_the_trainer_died_with_the_gpus(with_lost_engine, tmp_path):
    workspace = workspace_of(tmp_path)
    with LockstepRun(workspace) as run:
        run.until(lambda: run.has("saved", 2), "a checkpoint")
        address = next(iter(run.services("rollout")))
        hold_asleep(run, address, version=2)
        killed, engines = trainers(run), run.services("rollout")
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        run.until(lambda: len(run.ledger("opened")) == 2, "the run to be opened again")
        assert_gone(killed)
        assert run.services("rollout") == engines
        assert run.wait() == 0, run.output
        assert "SERVICE_DIED" in run.log and "starting again and resuming" in run.log
    assert weights(workspace) == weights(with_lost_engine.workspace) != {}
    assert numbers(workspace) == numbers(with_lost_engine.workspace)


def test_on_services_that_survive_a_run_resumes_with_another_placement(tmp_path: Path, lent: Sequence[str]):
    workspace = workspace_of(tmp_path, model=str(tmp_path / "model"))
    for version, placement in enumerate(("colocated", "disaggregated")):
        with LockstepRun(workspace, f"placement={placement}", *lent) as run:
            run.until(lambda version=version: run.has("collected", version), f"the batch of {version}")
            run.process.kill()
            run.process.wait()
    done = invoke("run", "run.yaml", *lent, cwd=workspace)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line["step"] for line in numbers(workspace) if "reward/mean" in line] == list(range(1, NUM_STEPS + 1))
    require_legal(workspace / "runs" / "run")
