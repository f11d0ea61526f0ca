"""Tests that every client renews the lease of the run that it has opened, until it is closed."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from lockstep.reward.v1 import reward_pb2, reward_pb2_grpc
from lockstep.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from lockstep.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from lockstep.types.v1.types_pb2 import ModelCard

from services.common.config.run import Config
from services.common.rpc.fence import HEADER, LEASE_HEADER, new_token
from services.common.rpc.server import Server
from services.coordinator.clients.replica import Replica
from services.coordinator.clients.reward import Reward
from services.coordinator.clients.trainer import Trainer
from tests.coordinator.fake_services import make_config
from tests.support import PATIENCE_S

_LEASE_S = 0.2


class _Service(
    rollout_pb2_grpc.RolloutServiceServicer,
    reward_pb2_grpc.RewardServiceServicer,
    trainer_pb2_grpc.TrainerServiceServicer,
):
    """Answers OpenRun and GetInfo of one kind of service, and keeps the headers of GetInfo."""

    def __init__(self, pb: Any):
        self._pb, self.renewals = pb, asyncio.Queue[dict[str, str]]()

    async def OpenRun(self, request: object, context: object) -> Any:
        return self._pb.OpenRunResponse()

    async def GetInfo(self, request: object, context: Any) -> Any:
        self.renewals.put_nowait(dict(context.invocation_metadata()))
        return self._pb.GetInfoResponse(**({"num_ranks": 1} if self._pb is trainer_pb2 else {}))


def _replica(address: str, config: Config) -> tuple[Any, Any]:
    replica = Replica(address, config.timeouts)
    return replica, replica.open("run", config, ModelCard())


def _reward(address: str, config: Config) -> tuple[Any, Any]:
    reward = Reward(address, config)
    return reward, reward.open("run")


def _trainer(address: str, config: Config) -> tuple[Any, Any]:
    trainer = Trainer(address, config)
    return trainer, trainer.open("run")


@pytest.mark.parametrize(
    ("pb", "add", "make"),
    [
        (rollout_pb2, rollout_pb2_grpc.add_RolloutServiceServicer_to_server, _replica),
        (reward_pb2, reward_pb2_grpc.add_RewardServiceServicer_to_server, _reward),
        (trainer_pb2, trainer_pb2_grpc.add_TrainerServiceServicer_to_server, _trainer),
    ],
)
async def test_a_client_calls_until_it_is_closed(pb: Any, add: Callable[..., None], make: Callable[..., Any]) -> None:
    server, service = Server(), _Service(pb)
    add(service, server.grpc)
    address = f"127.0.0.1:{await server.start('127.0.0.1:0', [])}"
    config = make_config(timeouts={"lease_s": _LEASE_S, "open_s": PATIENCE_S})
    try:
        with new_token(_LEASE_S):
            client, opening = make(address, config)
            await opening
            async with asyncio.timeout(PATIENCE_S):
                sent = [await service.renewals.get() for _ in range(3)]
            await client.close()
        assert {headers[LEASE_HEADER] for headers in sent} == {str(_LEASE_S)}
        assert len({headers[HEADER] for headers in sent}) == 1
        assert client._renewal._task.done()
    finally:
        await server.grpc.stop(None)
