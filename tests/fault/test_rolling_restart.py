"""Restarts the reward service and replaces a replica during a run, which loses nothing."""

import os
import re
import signal
from contextlib import ExitStack, chdir
from pathlib import Path

import pytest

from tests.e2e.lockstep_command import (
    Lent,
    LockstepRun,
    invoke,
    make_workspace,
    numbers,
    replica_info,
    running_services,
    weights,
)
from tests.fault.stopping import stop_while_generating
from tests.support import PATIENCE_S, free_port, running, service_command

pytestmark = pytest.mark.long
RESTARTED = ("reward", "rollout-0")


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory, lent_services: Lent) -> LockstepRun:
    """Provides a run during which replica 2 replaced replica 0 and the reward service was restarted.

    The restart is that of an orchestrator: SIGTERM, then a new process at the same address.
    """
    directory = tmp_path_factory.mktemp("rolling")
    workspace = make_workspace(directory, model=str(directory / "model"), num_steps=6)
    addresses = {name: f"127.0.0.1:{free_port()}" for name in RESTARTED}
    with ExitStack() as stack:
        started = stack.enter_context(running_services(addresses, workspace))
        services = dict(zip(addresses, started, strict=True))
        addresses |= {name: lent_services.addresses[name] for name in ("trainer", "rollout-1")}

        def start(name: str, address: str, log: str) -> None:
            with chdir(workspace):
                services[name] = stack.enter_context(
                    running(service_command(name.partition("-")[0], address), workspace / log)
                )

        options = [f"--{name.partition('-')[0]}={address}" for name, address in addresses.items()]
        with LockstepRun(workspace, *options) as run:
            run.until(lambda: run.has("published", 0), "the first publication")
            run.hold()
            services["reward"].terminate()
            services["reward"].wait(PATIENCE_S)
            start("reward", addresses["reward"], "reward-again.log")
            run.until(lambda: "lost the reward service" in run.log, "the loss to be noticed")
            run.release()
            run.until(lambda: run.has("collected", 2), "the next steps")
            run.hold()  # no step ends before the new replica is open
            old, new = addresses["rollout-0"], f"127.0.0.1:{free_port()}"
            engine = stop_while_generating(run, old, services["rollout-0"].pid, version=3)
            change_replicas(run, "add", new)
            start("rollout-2", new, "rollout-2.log")
            run.until(lambda: f"replica {new} has come" in run.log, "the new replica")
            shown = change_replicas(run, "remove", old)
            assert all(re.search(f"{at}.*{state}", shown) for at, state in ((old, "leaving"), (new, "joining"))), shown
            os.kill(engine, signal.SIGCONT)
            run.until(lambda: f"replica {old} has left the run" in run.log, "the old replica to finish and to leave")
            run.release()
            assert run.wait() == 0, run.output
        assert [replica_info(at).info.state for at in (old, new, addresses["rollout-1"])] == ["idle"] * 3
    return run


def change_replicas(run: LockstepRun, verb: str, address: str) -> str:
    done = invoke("replicas", verb, run.directory, address, cwd=run.workspace)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_numbers_and_model_are_those_of_an_undisturbed_run(restarted: LockstepRun, long_undisturbed: Path) -> None:
    assert numbers(restarted.workspace) == numbers(long_undisturbed)
    assert weights(restarted.workspace) == weights(long_undisturbed) != {}


def test_the_new_replica_is_in_the_publications_after_the_step_and_the_old_one_is_not(restarted: LockstepRun) -> None:
    received = {row["version"]: set(row["received"]) for row in restarted.ledger("published")}
    assert [len(received[version]) for version in range(7)] == [2] * 7
    assert received[3] != received[4] == received[6]
    assert [row["num_replicas"] for row in restarted.ledger("epoch")] == [2, 2]


def test_what_the_leaver_had_was_finished_and_not_sent_again(restarted: LockstepRun) -> None:
    assert "lost replica" not in restarted.log
