"""Tests that a run goes on with the same numbers when replicas die while they generate or receive weights."""

import json
import os
import re
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.e2e.lockstep_command import NUM_STEPS, LockstepRun, invoke, make_workspace, numbers, replica_info, weights
from tests.fault.stopping import all_idle, stop_while_generating
from tests.support import engine_of, still_there


def kill_while_generating(run: LockstepRun, address: str, version: int) -> None:
    """Kills the replica while it generates from `version`, and returns when it is back, before the step ends."""
    service = run.services("rollout")[address]
    stop_while_generating(run, address, service, version)
    os.kill(service, signal.SIGKILL)
    run.until(lambda: f"lost replica {address}:" in run.log, "the loss to be noticed")
    run.until(lambda: f"replica {address} is back" in run.log, "the replica to be back")
    assert not run.has("collected", version)


def kill_while_receiving(run: LockstepRun, victim: str, survivor: str, version: int) -> None:
    """Stops the victim's engine before it receives `version` + 1, and kills the victim while the survivor waits."""
    run.until(lambda: run.has("published", version), f"version {version} to be served")
    run.until(lambda: all_idle([victim, survivor]), "all groups to be generated")
    service = run.services("rollout")[victim]
    os.kill(engine_of(service), signal.SIGSTOP)
    run.release()
    run.until(lambda: not replica_info(survivor).HasField("stamp"), "the survivor to receive")
    run.until(lambda: version + 1 in sends(run), "the trainer to send")
    os.kill(service, signal.SIGKILL)


def sends(run: LockstepRun) -> list[int]:
    """Returns the versions that the trainer was asked to send."""
    lines = [line for path in (run.directory / "history").iterdir() for line in path.read_text().splitlines()]
    sent = [line for line in lines if '"call":"trainer.SendWeights"' in line and line.endswith("}")]
    return [json.loads(line)["sent"]["version"] for line in sent]


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[LockstepRun, object, object, list[int]]:
    """Provides the run, the result of a second coordinator, the info of the restarted replica, and the run's pids."""
    workspace = make_workspace(tmp_path_factory.mktemp("replicas"))
    with LockstepRun(workspace) as run:
        run.until(lambda: run.has("published", 0), "the first publication")
        first, second = run.services("rollout")
        run.until(lambda: run.has("collected", 0), "the first batch")
        run.hold()
        kill_while_generating(run, first, version=1)
        refused = invoke("run", "run.yaml", cwd=workspace)
        run.release()
        run.until(lambda: run.has("published", 2), "the next publication")
        served_again = replica_info(first)
        run.until(lambda: run.has("collected", 2), "the batch after it")
        run.hold()
        kill_while_receiving(run, second, first, version=3)
        run.until(lambda: run.has("published", 4), "the publication without the killed replica")
        below = list(run.below())
        assert run.wait() == 0, run.output
        assert run.process.returncode == 0
    return run, refused, served_again, below


def test_the_restarted_replica_is_in_the_next_publication(disturbed):
    run, _, served_again, _ = disturbed
    (published,) = [row for row in run.ledger("published") if row["version"] == 2]
    assert (served_again.stamp.version, served_again.stamp.digest) == (2, published["digest"])


def test_the_weight_group_follows_its_members(disturbed):
    run, *_ = disturbed
    epochs = run.ledger("epoch")
    first_published = {row["version"]: row["seq"] for row in reversed(run.ledger("published"))}
    before = {v: [e["num_replicas"] for e in epochs if e["seq"] < seq] for v, seq in first_published.items()}
    assert before[1] == [2]
    assert before[2] == [2, 2]  # both again, one of them a new process
    assert before[4] == [2, 2, 1]
    assert set(first_published) == set(range(NUM_STEPS + 1))


def test_nobody_waits_for_the_dead(disturbed):
    logs = "".join(path.read_text() for path in (disturbed[0].directory / "logs").iterdir())
    assert re.search(r"rank 0: send: epoch \d+, member 0: ", logs)
    assert "waited 60 s" not in logs  # 60 s is weights.timeout_s; the survivor need not wait, because it was told


def test_no_sample_is_lost_or_drawn_twice(disturbed, undisturbed: Path):
    run, *_ = disturbed
    for version in range(NUM_STEPS):
        name = Path("runs") / "run" / "batches" / f"step-{version:06d}.parquet"
        ours, theirs = pq.read_table(run.workspace / name), pq.read_table(undisturbed / name)
        assert len(set(zip(ours["prompt_id"].to_pylist(), ours["sample"].to_pylist(), strict=True))) == 8 * 4
        assert ours.num_rows == 8 * 4
        # Seeds follow from step, prompt and sample alone, so a group that is generated again is the same.
        assert ours.equals(theirs)


def test_the_numbers_and_the_model_are_those_of_an_undisturbed_run(disturbed, undisturbed: Path):
    run, *_ = disturbed
    assert numbers(run.workspace) == numbers(undisturbed)
    assert weights(run.workspace) == weights(undisturbed) != {}


def test_a_second_coordinator_is_refused(disturbed):
    _, refused, *_ = disturbed
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    assert "run" in refused.stderr
    assert "another" in refused.stderr


def test_nothing_is_left_behind(disturbed):
    assert not still_there(disturbed[3])
