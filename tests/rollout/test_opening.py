"""Tests callers that give up while an engine starts, or come in place of another. The engine is a fake."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from lockstep.rollout.v1 import rollout_pb2 as pb
from lockstep.rollout.v1 import rollout_pb2_grpc
from lockstep.rollout.v1.rollout_pb2_grpc import RolloutServiceServicer as RolloutService
from lockstep.types.v1.types_pb2 import ModelCard

from services.common.config.run import TimeoutsConfig
from services.common.rpc.client import Client
from services.common.rpc.fence import new_token
from services.common.rpc.server import Server
from services.coordinator.clients.replica import Replica
from services.rollout import servicer as rollout_servicer
from services.rollout.servicer import NAME, RolloutServicer
from tests.coordinator.fake_services import make_config
from tests.support import PATIENCE_S


class FakeEngine(SimpleNamespace):
    """As far as the servicer knows it before weights are published."""

    num_workers, samples_in_flight, routed_experts, asleep = 1, 0, None, frozenset[str]()

    async def close(self) -> None:
        self.events.append("closed")

    async def sleep(self) -> list[Any]:
        self.events.append("asleep")
        return []


async def test_an_engine_whose_caller_gave_up_is_the_next_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, begun, events = asyncio.Event(), asyncio.Event(), []

    async def start(*_: Any) -> FakeEngine:
        events.append("started")
        begun.set()
        await gate.wait()
        return FakeEngine(events=events)

    monkeypatch.setattr(rollout_servicer, "Engine", SimpleNamespace(start=start))
    server, servicer = Server(), RolloutServicer(pytest.fail)
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, server.grpc)
    client = Client(f"127.0.0.1:{await server.start('127.0.0.1:0', [NAME])}", rollout_pb2_grpc.RolloutServiceStub)
    request = pb.OpenRunRequest(run_id="r", config_json="{}")
    first = asyncio.create_task(client.call(RolloutService.OpenRun, request, timeout_s=PATIENCE_S))
    await begun.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    again = asyncio.create_task(client.call(RolloutService.OpenRun, request, timeout_s=PATIENCE_S))
    await client.call(
        RolloutService.GetInfo, pb.GetInfoRequest(), timeout_s=PATIENCE_S
    )  # the server has read what came before
    gate.set()
    assert (await again).num_workers == 1
    assert events == ["started"]
    await client.call(
        RolloutService.CloseRun, pb.CloseRunRequest(run_id="another"), timeout_s=PATIENCE_S
    )  # late, of another run
    assert events == ["started"]
    await client.call(RolloutService.CloseRun, pb.CloseRunRequest(run_id="r"), timeout_s=PATIENCE_S)
    assert events == ["started", "closed"]
    await client.close()
    await server.grpc.stop(None)


async def test_a_session_puts_the_engine_of_the_one_before_to_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    async def start(*_: Any) -> FakeEngine:
        return FakeEngine(events=events)

    monkeypatch.setattr(rollout_servicer, "Engine", SimpleNamespace(start=start))
    server, servicer = Server(), RolloutServicer(pytest.fail)
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, server.grpc)
    replica = Replica(f"127.0.0.1:{await server.start('127.0.0.1:0', [NAME])}", TimeoutsConfig())
    config, card = make_config(placement="colocated"), ModelCard(files={"config.json": b"{}"})
    await replica.sleep("r")  # nothing is open
    with new_token():
        await replica.open("r", config, card)
    with new_token():
        await replica.sleep("another")
        assert events == []
        await replica.sleep("r")
        assert events == ["asleep"]
        await replica.open("r", config, card)
    assert events == ["asleep"]  # and the next session has the same engine
    await replica.close()
    await server.grpc.stop(None)
