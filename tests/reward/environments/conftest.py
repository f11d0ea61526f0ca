"""Serves the reward service over gRPC, with an environment in real worker processes."""

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from lockstep.reward.v1 import environment_pb2 as pb
from lockstep.reward.v1 import environment_pb2_grpc, reward_pb2, reward_pb2_grpc
from lockstep.reward.v1.environment_pb2_grpc import EnvironmentServiceServicer as EnvironmentService
from lockstep.reward.v1.reward_pb2_grpc import RewardServiceServicer as RewardService
from lockstep.types.v1 import types_pb2
from prometheus_client import CollectorRegistry

from services.common.rpc.client import Client
from services.common.rpc.server import Server
from services.reward.environments.servicer import NAME
from services.reward.metrics import RewardMetrics
from services.reward.servicer import RewardServicer
from tests.support import PATIENCE_S

SCORERS = json.dumps({"scorers": [{"kind": "exact"}]})


class Service:
    """Calls the two services of one server."""

    def __init__(self, port: int, servicer: RewardServicer, registry: CollectorRegistry):
        self.servicer, self._registry = servicer, registry
        self._runs = Client(f"127.0.0.1:{port}", reward_pb2_grpc.RewardServiceStub)
        self._client = Client(f"127.0.0.1:{port}", environment_pb2_grpc.EnvironmentServiceStub)

    async def open(self, run_id: str = "r", **environment: object) -> reward_pb2.OpenRunResponse:
        settings = {"num_workers": 1, "turn_s": PATIENCE_S, **environment}  # None: the kind has no such setting
        settings = {name: value for name, value in settings.items() if value is not None}
        section = json.dumps(settings) if environment else ""
        request = reward_pb2.OpenRunRequest(run_id=run_id, config_json=SCORERS, environment_json=section)
        return await self._runs.call(RewardService.OpenRun, request, timeout_s=PATIENCE_S)

    async def close_run(self, run_id: str = "r") -> None:
        request = reward_pb2.CloseRunRequest(run_id=run_id)
        await self._runs.call(RewardService.CloseRun, request, timeout_s=PATIENCE_S)

    async def reset(
        self,
        episode: str = "e",
        *,
        seed: int = 7,
        run_id: str = "r",
        row_json: str = "",
        alone: bool = False,
        **row: object,
    ) -> pb.ResetResponse:
        row_json = row_json or json.dumps(row)
        request = pb.ResetRequest(run_id=run_id, episode_id=episode, seed=seed, row_json=row_json, alone=alone)
        return await self._client.call(EnvironmentService.Reset, request, timeout_s=PATIENCE_S)

    async def step(self, turn: int, text: str, episode: str = "e", **fields: object) -> pb.StepResponse:
        stop = types_pb2.FINISH_REASON_STOP
        defaults = {"run_id": "r", "episode_id": episode, "num_tokens": 3, "finish_reason": stop}
        request = pb.StepRequest(turn=turn, text=text, **{**defaults, **fields})
        return await self._client.call(EnvironmentService.Step, request, timeout_s=PATIENCE_S)

    async def close(self, episode: str = "e", *, run_id: str = "r") -> None:
        request = pb.CloseRequest(run_id=run_id, episode_id=episode)
        await self._client.call(EnvironmentService.Close, request, timeout_s=PATIENCE_S)

    def metric(self, name: str, **labels: str) -> float:
        return self._registry.get_sample_value(name, labels) or 0.0

    @property
    def pids(self) -> list[int]:
        """Returns the pids of the open environment's worker processes."""
        workers = self.servicer.environments._table._context.environment._workers
        return [worker.pid for worker in workers._workers]

    async def hang_up(self) -> None:
        await self._runs.close()
        await self._client.close()


@pytest.fixture(scope="session")
def serving() -> Callable[[], contextlib.AbstractAsyncContextManager[Service]]:
    @contextlib.asynccontextmanager
    async def served() -> AsyncIterator[Service]:
        registry = CollectorRegistry()
        server, servicer = Server(), RewardServicer(RewardMetrics(registry))
        reward_pb2_grpc.add_RewardServiceServicer_to_server(servicer, server.grpc)
        environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(servicer.environments, server.grpc)
        port = await server.start("127.0.0.1:0", ["lockstep.reward.v1.RewardService", NAME])
        service = Service(port, servicer, registry)
        try:
            yield service
        finally:
            await service.hang_up()
            await servicer.close()
            await server.grpc.stop(0)

    return served


@pytest.fixture
async def service(serving, monkeypatch) -> AsyncIterator[Service]:
    """Yields a service whose workers can import user_environments."""
    monkeypatch.chdir(Path(__file__).parent)
    async with serving() as service:
        yield service
