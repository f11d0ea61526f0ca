"""An engine that hangs while its service answers: the run goes on with the other replica, and this one comes back."""

import os
import signal
from pathlib import Path

from tests.e2e.lockstep_command import LockstepRun, make_workspace, numbers, weights
from tests.fault.stopping import all_idle
from tests.support import engine_of, still_there


def test_the_run_goes_on_and_the_engine_is_replaced(tmp_path: Path, undisturbed: Path) -> None:
    workspace = make_workspace(tmp_path, weights={"timeout_s": 15.0})
    with LockstepRun(workspace) as run:
        run.until(lambda: run.has("collected", 0), "the first batch")
        run.hold()
        run.until(lambda: run.has("published", 1), "version 1 to be served, after which nothing is evaluated")
        replicas = run.services("rollout")
        run.until(lambda: all_idle(list(replicas)), "all groups to be generated")
        before = run.ledger("published")[-1]["version"]
        hung = list(replicas)[1]
        engine = engine_of(replicas[hung])
        os.kill(engine, signal.SIGSTOP)
        run.release()
        run.until(lambda: run.has("published", before + 1), "the publication without the engine that hangs")
        # Once in the epoch that it had joined, once when the next was formed.
        assert [epoch["num_replicas"] for epoch in run.ledger("epoch")][-3:] == [2, 2, 1]
        assert run.log.count(f"replica {hung} did not take part") >= 2
        run.until(lambda: f"replica {hung} is back" in run.log, "the replica to be back")
        assert not still_there([engine])
        run.until(lambda: [epoch["num_replicas"] for epoch in run.ledger("epoch")][-1] == 2, "it to take part again")
        assert run.wait() == 0, run.output
    assert numbers(workspace) == numbers(undisturbed)
    assert weights(workspace) == weights(undisturbed) != {}
