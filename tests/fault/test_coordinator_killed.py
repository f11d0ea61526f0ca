"""Kills, stops and interrupts a coordinator: nothing is left running, and the run resumes exactly."""

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.lockstep_command import ExecutedRun, LockstepRun, assert_gone, make_workspace, numbers, weights


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # One replica instead of two: the numbers must not depend on it.
    directory = tmp_path_factory.mktemp("coordinator")
    make_workspace(directory, model=str(directory / "model"))
    text = (directory / "run.yaml").read_text()
    assert "num_replicas: 2" in text
    (directory / "run.yaml").write_text(text.replace("num_replicas: 2", "num_replicas: 1"))
    return directory


def interrupted(run: LockstepRun, number: int = signal.SIGINT) -> tuple[int, dict[int, str]]:
    """Interrupts a run that is held in its first step; returns how much was published before it, and its processes."""
    before = len(run.ledger("published"))
    run.until(lambda: len(run.ledger("published")) > before, "the first publication")
    below = run.below()
    run.process.send_signal(number)
    # The log, which also has the lines of earlier tests, is read only where nobody reads the output.
    said = (lambda: run.log) if number == signal.SIGHUP else (lambda: run.output)
    run.until(lambda: "stopping after this step" in said(), "the interrupt to be noticed")
    return before, below


def test_a_killed_coordinator_takes_its_services_with_it(workspace: Path):
    with ExecutedRun(workspace) as run:
        # With its evaluation, which the next test's run would else begin with, and end in place of a step.
        run.until(lambda: run.has("saved", 2) and run.has("evaluated", 2), "a checkpoint")
        below = run.below()
        assert len(below) >= 7  # the trainer's launcher and 2 ranks, rollout and its engine, reward and its worker
        run.process.kill()
        assert_gone(below)


@pytest.mark.skipif(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, reason="these tests were started with nohup")
def test_the_end_of_the_terminal_ends_the_run_after_its_step(workspace: Path, lent: Sequence[str]):
    (workspace / "hold").touch()  # the step does not end before the interrupt is noticed
    with LockstepRun(workspace, "resume=must", *lent[:2]) as run:  # the reward service is the run's own
        before, below = interrupted(run, signal.SIGHUP)
        run.process.send_signal(signal.SIGHUP)  # the shell and the kernel may both send one
        run.release()
        assert run.wait() == 3, run.output
        assert "Traceback" not in run.output
        assert_gone(below)
        # Resumed from the checkpoint of version 2; the step that was interrupted is whole.
        assert run.ledger("opened")[-1]["checkpoint"].endswith("step-000002")
        assert [row["version"] for row in run.ledger("published")[before:]] == [2, 3]
        assert run.ledger("finished")[-1]["version"] == 3


def test_a_second_interrupt_ends_it_at_once(workspace: Path, lent: Sequence[str]):
    (workspace / "hold").touch()  # the step would never end
    with LockstepRun(workspace, *lent[:2]) as run:
        _, below = interrupted(run)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.output
        assert "Traceback" not in run.output
        assert_gone(below)
        run.release()


def test_it_ends_with_the_numbers_and_the_model_of_an_undisturbed_run(
    workspace: Path, undisturbed: Path, lent: Sequence[str]
):
    with LockstepRun(workspace, "resume=must", *lent[:2]) as run:  # on services that were not started by the run
        assert run.wait() == 0, run.output
    assert numbers(workspace) == numbers(undisturbed)
    assert weights(workspace) == weights(undisturbed) != {}
