"""Tests that small requests and exports, which may be repeated, outlive a connection that is reset."""

import asyncio
from collections.abc import Awaitable, Callable

from lockstep.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from lockstep.trainer.v1 import trainer_pb2, trainer_pb2_grpc

from services.common.config.operation import TimeoutsConfig
from services.common.rpc.server import Server
from services.coordinator.clients.replica import Replica
from services.coordinator.clients.trainer import Trainer
from tests.common.rpc.test_retry import _Proxy
from tests.coordinator.fake_services import make_config
from tests.support import PATIENCE_S


class _Slow:
    """Answers the first call never."""

    def __init__(self) -> None:
        self.num_calls, self.entered = 0, asyncio.Event()

    async def count(self) -> None:
        self.num_calls += 1
        if self.num_calls == 1:
            self.entered.set()
            await asyncio.Event().wait()


class _SlowTrainer(_Slow, trainer_pb2_grpc.TrainerServiceServicer):
    async def ExportHuggingFace(self, request: object, context: object) -> trainer_pb2.ExportHuggingFaceResponse:
        await self.count()
        return trainer_pb2.ExportHuggingFaceResponse(num_bytes=1)


class _SlowReplica(_Slow, rollout_pb2_grpc.RolloutServiceServicer):
    async def GetInfo(self, request: object, context: object) -> rollout_pb2.GetInfoResponse:
        await self.count()
        return rollout_pb2.GetInfoResponse(num_workers=1)


async def _reset_in_first_call(service: _Slow, name: str, call: Callable[[str], Awaitable[object]]) -> object:
    """Resets the connection in the first call of `call`, which gets an address; returns its result."""
    server = Server()
    if isinstance(service, _SlowTrainer):
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(service, server.grpc)
    elif isinstance(service, _SlowReplica):
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(service, server.grpc)
    proxy = _Proxy(await server.start("127.0.0.1:0", [name]))
    try:
        calling = asyncio.ensure_future(call(f"127.0.0.1:{await proxy.start()}"))
        async with asyncio.timeout(PATIENCE_S):
            await service.entered.wait()
            proxy.reset()
            return await calling
    finally:
        proxy.close()
        await server.grpc.stop(0)


async def test_an_export_is_repeated():
    service = _SlowTrainer()

    async def export(address: str) -> None:
        trainer = Trainer(address, make_config())
        await trainer.export("model")
        await trainer.close()

    await _reset_in_first_call(service, "lockstep.trainer.v1.TrainerService", export)
    assert service.num_calls == 2


async def test_a_replica_whose_connection_was_reset_is_alive():
    service = _SlowReplica()

    async def is_alive(address: str) -> bool:
        replica = Replica(address, TimeoutsConfig(info_s=PATIENCE_S))
        try:
            return await replica.is_alive()
        finally:
            await replica.close()

    assert await _reset_in_first_call(service, "lockstep.rollout.v1.RolloutService", is_alive)
    assert service.num_calls == 2
