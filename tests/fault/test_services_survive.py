"""Tests services that go on while their coordinator ends.

Another run replaces the coordinator, or it is killed in the middle of a step.
"""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from lockstep.trainer.v1 import trainer_pb2 as pb
from lockstep.trainer.v1 import trainer_pb2_grpc
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer as TrainerService

from services.common.rpc.client import Client
from tests.e2e.lockstep_command import NUM_STEPS, Lent, LockstepRun, make_workspace, numbers, running_services, weights
from tests.fault.test_replica_killed import all_idle
from tests.support import PATIENCE_S, engine_of, free_port


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("survivors")
    return make_workspace(directory, model=str(directory / "model"))


@pytest.fixture(scope="module")
def services(workspace: Path, lent_services: Lent) -> Iterator[dict[str, tuple[str, int]]]:
    """Yields the address and pid of each service, by its name."""
    address = f"127.0.0.1:{free_port()}"
    lent = {
        name: (lent_services.addresses[name], lent_services.processes[name].pid) for name in ("trainer", "rollout-0")
    }
    with running_services({"reward": address}, workspace) as (reward,):
        yield {"trainer": lent["trainer"], "reward": (address, reward.pid), "rollout": lent["rollout-0"]}


def options(services: dict[str, tuple[str, int]]) -> list[str]:
    return [f"--{name}={address}" for name, (address, _) in services.items()]


def trainer_version(address: str) -> int:
    async def ask() -> int:
        client = Client(address, trainer_pb2_grpc.TrainerServiceStub)
        try:
            info = await client.call(TrainerService.GetInfo, pb.GetInfoRequest(), timeout_s=PATIENCE_S)
            return info.stamp.version
        finally:
            await client.close()

    return asyncio.run(ask())


def test_a_run_that_another_replaces_on_its_services_ends_and_says_so(
    workspace: Path, services: dict[str, tuple[str, int]], tmp_path: Path
) -> None:
    other = make_workspace(tmp_path, model=str(tmp_path / "model"))
    with LockstepRun(workspace, *options(services)) as first:
        first.hold()  # it waits for its first rewards
        first.until(lambda: first.has("published", 0), "the first publication")
        with LockstepRun(other, *options(services), "num_steps=1") as second:
            assert first.wait() == 2, first.output
            assert "was opened on this service and has replaced run run-" in first.output
            assert "Traceback" not in first.output
            first.release()
            assert second.wait() == 0, second.output
    assert not first.ledger("collected")


def test_a_coordinator_that_was_killed_with_a_step_half_done_finishes_it(
    workspace: Path, services: dict[str, tuple[str, int]], undisturbed: Path
) -> None:
    (replica, service), (trainer, _) = services["rollout"], services["trainer"]
    with LockstepRun(workspace, *options(services)) as run:
        run.until(lambda: run.has("published", 1), "version 1 to be served")
        run.hold()
        version = run.ledger("published")[-1]["version"]
        engine = engine_of(service)
        run.until(lambda: all_idle([replica]), "all groups to be generated")
        os.kill(engine, signal.SIGSTOP)  # nothing can be published
        run.release()
        run.until(lambda: trainer_version(trainer) > version, "the trainer to apply the next batch")
        run.process.kill()
        os.kill(engine, signal.SIGCONT)
    with LockstepRun(workspace, *options(services), "resume=auto") as run:
        assert run.wait() == 0, run.output
        assert "which the trainer has applied and the record does not have yet" in run.output
    assert numbers(workspace) == numbers(undisturbed)
    assert weights(workspace) == weights(undisturbed) != {}
    counts = {kind: Counter(row["version"] for row in run.ledger(kind)) for kind in ("finished", "evaluated", "saved")}
    assert counts["finished"] == Counter(range(1, NUM_STEPS + 1))
    assert counts["evaluated"] == Counter((0, 2, 4))
    assert counts["saved"] == Counter((2, 4))
