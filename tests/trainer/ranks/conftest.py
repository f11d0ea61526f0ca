"""Fake ranks, and the real servicer over them."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from lockstep.trainer.v1 import trainer_pb2 as pb
from lockstep.trainer.v1 import trainer_pb2_grpc
from lockstep.trainer.v1.trainer_pb2_grpc import TrainerServiceServicer as TrainerService

from services.common.rpc.client import Client
from services.common.rpc.server import Server
from services.common.weights.store import ServedStore
from services.trainer.servicer import NAME, TrainerServicer
from tests.support import PATIENCE_S
from tests.trainer.rank_threads import following
from tests.trainer.ranks.crew import Crew, Service


@pytest.fixture
async def crew() -> AsyncIterator[Crew]:
    crew = Crew()
    async with following(crew.ranks, *crew.workers):
        async with asyncio.timeout(PATIENCE_S):
            await crew.ranks.wait_for_all()
        yield crew
        crew.open_gates()


@pytest.fixture
async def service(crew: Crew, tmp_path: Path) -> AsyncIterator[Service]:
    server = Server()
    servicer = TrainerServicer(crew.ranks, crew.workers[0], ServedStore("127.0.0.1"))
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(servicer, server.grpc)
    client = Client(f"127.0.0.1:{await server.start('127.0.0.1:0', [NAME])}", trainer_pb2_grpc.TrainerServiceStub)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 64}))
    request = pb.OpenRunRequest(run_id="r", config_json="{}", model_path=str(tmp_path), bucket_bytes=1024)
    await client.call(TrainerService.OpenRun, request, timeout_s=PATIENCE_S)
    join = pb.JoinWeightGroupRequest()
    join.group.epoch = 1
    await client.call(TrainerService.JoinWeightGroup, join, timeout_s=PATIENCE_S)
    service = Service(crew, client, tmp_path)
    await service.send()
    yield service
    crew.open_gates()
    await client.close()
    await server.grpc.stop(None)
