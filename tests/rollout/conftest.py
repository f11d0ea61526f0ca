"""Shares service processes among all rollout tests, because an engine start costs more than the tests."""

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from lockstep.rollout.v1 import rollout_pb2_grpc
from lockstep.trainer.v1 import trainer_pb2_grpc

from services.common.rpc.client import Client
from tests.e2e.lockstep_command import Lent, forked_or_running
from tests.rollout.rollout_stack import PlayedTrainer, Replica, Stack
from tests.support import free_port, make_model, service_command

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            made[kind] = make_model(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return of


@pytest.fixture(scope="session")
def start_replica(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., contextlib.AbstractAsyncContextManager]:
    @contextlib.asynccontextmanager
    async def started(start: Callable = forked_or_running) -> AsyncIterator[tuple[Replica, object]]:
        address = f"127.0.0.1:{free_port()}"
        log = tmp_path_factory.mktemp("rollout") / "log"
        client = Client(address, rollout_pb2_grpc.RolloutServiceStub)
        with start(service_command("rollout", address), log) as process:
            yield Replica(client, process.pid, log), process
            await client.close()

    return started


@pytest_asyncio.fixture(scope="session")
async def replicas(lent_services: Lent) -> AsyncIterator[list[Replica]]:
    """Yields the replicas of `lent_services`, which serve metrics."""
    replicas_found = []
    for name in ("rollout-0", "rollout-1"):
        client = Client(lent_services.addresses[name], rollout_pb2_grpc.RolloutServiceStub)
        log = lent_services.directory / f"{name}.log"
        replicas_found.append(Replica(client, lent_services.processes[name].pid, log, lent_services.page(name)))
    yield replicas_found
    for replica in replicas_found:
        await replica.close()
        await replica.client.close()


@pytest_asyncio.fixture(scope="session")
async def stack(replicas: list[Replica], lent_services: Lent) -> AsyncIterator[Stack]:
    client = Client(lent_services.addresses["trainer"], trainer_pb2_grpc.TrainerServiceStub)
    yield Stack(client, replicas)
    await client.close()


@pytest.fixture(scope="session")
def played_trainer(replicas: list[Replica], model: Callable[[str], Path]) -> PlayedTrainer:
    return PlayedTrainer(model("untied"), replicas[0], "played")


@pytest_asyncio.fixture
async def played(played_trainer: PlayedTrainer, model: Callable[[str], Path]) -> PlayedTrainer:
    """Provides a trainer that the test plays, for the first replica.

    The replica returns sampling masks to requests that ask for them. The fixture costs an engine start if another run
    was open there.
    """
    await played_trainer.replica.open(model("untied"), played_trainer.run_id, sampling={"top_k": 20})
    return played_trainer
