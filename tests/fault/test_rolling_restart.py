"""Reward service and one replica are replaced, one after the other, while a run goes on: nothing of it is lost."""

import os
import signal
from contextlib import ExitStack, chdir
from pathlib import Path

import pytest

from tests.e2e.lockstep_command import (
    Lent,
    LockstepRun,
    make_workspace,
    numbers,
    replica_info,
    running_services,
    weights,
)
from tests.fault.stopping import stop_while_generating
from tests.support import PATIENCE_S, free_port, running, service_command

RESTARTED = ("reward", "rollout-0")


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory, lent_services: Lent) -> LockstepRun:
    """A run whose services have addresses. Two of them are asked to end and started anew as an orchestrator does it."""
    directory = tmp_path_factory.mktemp("rolling")
    workspace = make_workspace(directory, model=str(directory / "model"))
    addresses = {name: f"127.0.0.1:{free_port()}" for name in RESTARTED}
    with ExitStack() as stack:
        started = stack.enter_context(running_services(addresses, workspace))
        services = dict(zip(addresses, started, strict=True))
        addresses |= {name: lent_services.addresses[name] for name in ("trainer", "rollout-1")}

        def restart(name: str, stopped: int | None = None) -> None:
            services[name].terminate()
            if stopped is not None:
                os.kill(stopped, signal.SIGCONT)
            services[name].wait(PATIENCE_S)
            command = service_command(name.partition("-")[0], addresses[name])
            with chdir(workspace):
                services[name] = stack.enter_context(running(command, workspace / f"{name}-again.log"))

        options = [f"--{name.partition('-')[0]}={address}" for name, address in addresses.items()]
        with LockstepRun(workspace, *options) as run:
            run.until(lambda: run.has("published", 0), "the first publication")
            run.hold()
            restart("reward")
            run.until(lambda: "lost the reward service" in run.log, "the loss to be noticed")
            run.release()
            run.until(lambda: run.has("collected", 2), "the next steps")
            run.hold()  # no step ends before the replica is back
            engine = stop_while_generating(run, addresses["rollout-0"], services["rollout-0"].pid, version=3)
            restart("rollout-0", engine)
            run.until(lambda: f"replica {addresses['rollout-0']} is back" in run.log, "the replica to be back")
            run.release()
            assert run.wait() == 0, run.output
        assert [replica_info(addresses[name]).info.state for name in ("rollout-0", "rollout-1")] == ["idle"] * 2
    return run


def test_numbers_and_model_are_those_of_an_undisturbed_run(restarted: LockstepRun, undisturbed: Path) -> None:
    assert numbers(restarted.workspace) == numbers(undisturbed)
    assert weights(restarted.workspace) == weights(undisturbed) != {}


def test_the_new_replica_is_in_the_last_publication(restarted: LockstepRun) -> None:
    assert restarted.ledger("epoch")[-1]["num_replicas"] == 2
