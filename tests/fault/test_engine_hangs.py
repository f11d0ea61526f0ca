"""Tests runs whose processes are stopped (SIGSTOP) but do not end.

The run names the process that does not answer, and goes on as far as it can.
"""

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.lockstep_command import LockstepRun, make_workspace, numbers, replica_info, weights
from tests.fault.stopping import all_idle, stop_while_generating
from tests.support import descendants, engine_of, still_there

# Far above the second that a group takes, and above the time after which a silent connection is noticed.
GENERATE_S = 30.0
pytestmark = pytest.mark.long


def lost(run: LockstepRun, address: str) -> list[str]:
    return [line for line in run.log.splitlines() if f"lost replica {address}: " in line]


def times_back(run: LockstepRun, address: str) -> int:
    return run.log.count(f"replica {address} is back")


def epochs_before(run: LockstepRun, version: int) -> list[int]:
    """Returns the number of replicas of every epoch of the weight group until `version` was published."""
    published = next(row["seq"] for row in run.ledger("published") if row["version"] == version)
    return [epoch["num_replicas"] for epoch in run.ledger("epoch") if epoch["seq"] < published]


def stop_a_service(run: LockstepRun, address: str, version: int) -> None:
    """Stops a whole replica while it generates from `version`, and lets it go on after the next publication."""
    service = run.services("rollout")[address]
    engine = stop_while_generating(run, address, service, version)
    os.kill(service, signal.SIGSTOP)
    run.until(lambda: lost(run, address), "the silence to be noticed")
    run.release()
    run.until(lambda: run.has("published", version + 1), "the publication without the silent replica")
    run.hold()
    assert epochs_before(run, version + 1)[-1] == 1
    for pid in (service, engine):
        os.kill(pid, signal.SIGCONT)
    run.until(lambda: times_back(run, address) == 1, "the replica to be back")
    run.release()


def stop_an_engine_that_generates(run: LockstepRun, address: str, version: int) -> None:
    """Stops only the engine of a replica while it generates from `version`; its service still answers."""
    engine = stop_while_generating(run, address, run.services("rollout")[address], version)
    run.until(lambda: lost(run, address), "the deadline of a group")
    assert replica_info(address).info.service == "rollout"
    run.until(lambda: times_back(run, address) == 1, "the replica to be back")
    assert not still_there([engine])


def stop_an_engine_before_it_joins(run: LockstepRun, address: str, version: int) -> None:
    """Stops only the engine of a replica that has no samples, before `version` is published."""
    run.until(lambda: all_idle(list(run.services("rollout"))), "all groups to be generated")
    engine = engine_of(run.services("rollout")[address])
    os.kill(engine, signal.SIGSTOP)
    run.release()
    run.until(lambda: run.has("published", version), "the publication without the engine that hangs")
    run.hold()
    run.until(lambda: times_back(run, address) == 2, "the replica to be back once more")
    assert not still_there([engine])


def stop_the_trainer(run: LockstepRun, version: int) -> None:
    """Stops all ranks of the trainer in the step that begins with `version`."""
    run.until(lambda: run.has("published", version), f"version {version} to be served")
    (launcher,) = run.services("trainer").values()
    for pid in descendants(launcher):
        os.kill(pid, signal.SIGSTOP)
    run.release()


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[LockstepRun, list[str]]:
    """Provides a run that ended after its trainer was stopped, and the addresses of the trainer and the replicas."""
    limits = {"num_steps": 6, "weights": {"timeout_s": 15.0}, "timeouts": {"generate_s": GENERATE_S}}
    workspace = make_workspace(tmp_path_factory.mktemp("hanging"), **limits)
    with LockstepRun(workspace) as run:
        run.until(lambda: run.has("collected", 0), "the first batch")
        run.hold()
        first, second = run.services("rollout")
        stop_a_service(run, first, version=1)
        run.until(lambda: run.has("collected", 2), "the next batch")
        run.hold()
        stop_an_engine_that_generates(run, second, version=3)
        stop_an_engine_before_it_joins(run, first, version=4)
        if not run.has("collected", 4):
            run.release()
            run.until(lambda: run.has("collected", 4), "the batch after it")
            run.hold()
        run.until(lambda: run.has("saved", 4), "the checkpoint")
        addresses, below = [*run.services("trainer"), first, second], list(run.below())
        stop_the_trainer(run, version=5)
        run.wait()
        assert not still_there(below)
    return run, addresses


def test_a_silent_process_is_noticed_by_its_connection(disturbed):
    run, (_, first, _) = disturbed
    assert "the rollout service no longer answers" in lost(run, first)[0]


def test_an_engine_that_hangs_is_noticed_by_the_deadline_of_a_group(disturbed):
    run, (_, _, second) = disturbed
    assert "timeouts.generate_s" in lost(run, second)[0]


def test_an_engine_that_misses_two_publications_in_a_row_is_dropped(disturbed):
    run, (_, first, _) = disturbed
    assert "its engine hangs" in lost(run, first)[-1]
    assert run.log.count(f"replica {first} did not take part") >= 2
    assert epochs_before(run, 4)[-3:] == [2, 2, 1]


def test_a_silent_trainer_ends_the_run_with_its_name(disturbed):
    run, (trainer, _, _) = disturbed
    assert run.process.returncode == 2
    last = run.output.splitlines()[-1]
    assert last.startswith("lockstep: error: UNREACHABLE: "), run.output
    assert f" at {trainer}: the trainer service no longer answers" in last
    assert "Traceback" not in run.output


def test_the_same_command_ends_with_the_numbers_and_the_model_of_an_undisturbed_run(disturbed, long_undisturbed: Path):
    workspace = disturbed[0].workspace
    with LockstepRun(workspace) as run:
        assert run.wait() == 0, run.output
    assert run.ledger("opened")[-1]["checkpoint"].endswith("step-000004")
    assert numbers(workspace) == numbers(long_undisturbed)
    assert weights(workspace) == weights(long_undisturbed) != {}
