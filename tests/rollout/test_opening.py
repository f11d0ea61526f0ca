"""Tests a caller that gives up while an engine starts. The engine is a fake: a real one does not wait for the test."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from lockstep.rollout.v1 import rollout_pb2 as pb
from lockstep.rollout.v1 import rollout_pb2_grpc
from lockstep.rollout.v1.rollout_pb2_grpc import RolloutServiceServicer as RolloutService

from services.common.rpc.client import Client
from services.common.rpc.server import Server
from services.rollout import servicer as rollout_servicer
from services.rollout.servicer import NAME, RolloutServicer
from tests.support import PATIENCE_S


class FakeEngine(SimpleNamespace):
    """As far as the servicer knows it before weights are published."""

    num_workers, samples_in_flight, routed_experts = 1, 0, None

    async def close(self) -> None:
        self.events.append("closed")


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
