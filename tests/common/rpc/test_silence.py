"""Tests that a silent peer is noticed although its connection is open: its host is frozen, or the network is cut."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from lockstep.reward.v1 import reward_pb2 as pb
from lockstep.reward.v1 import reward_pb2_grpc
from lockstep.reward.v1.reward_pb2_grpc import RewardServiceServicer as RewardService

from services.common.errors import DeadlineExceeded, Unavailable
from services.common.rpc import channel as options
from services.common.rpc import client as client_module
from services.common.rpc.client import Client
from services.common.rpc.server import Server
from tests.campaign.proxy import Proxy
from tests.support import PATIENCE_S

# This is less than the minute that gRPC waits for the answer to a ping, unless it is told otherwise.
LIMIT_S = 40.0


class Reward(reward_pb2_grpc.RewardServiceServicer):
    """Answers GetInfo, but never OpenRun."""

    def __init__(self) -> None:
        self.entered, self.canceled = asyncio.Event(), asyncio.Event()

    async def OpenRun(self, request: pb.OpenRunRequest, context: object) -> pb.OpenRunResponse:
        self.entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.canceled.set()
        raise AssertionError

    async def GetInfo(self, request: pb.GetInfoRequest, context: object) -> pb.GetInfoResponse:
        return pb.GetInfoResponse()


class Relay:
    """Passes bytes on between a client and a server until `fall_silent`; then it reads and writes nothing."""

    def __init__(self, port: int):
        self._port, self._is_open = port, True
        self._stuck = asyncio.Event()

    def fall_silent(self) -> None:
        self._is_open = False

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._stuck.set()
        server.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._port)
        await asyncio.gather(self._pass_on(reader, inner_writer), self._pass_on(inner_reader, writer))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            while self._is_open and (data := await reader.read(1 << 16)) and self._is_open:
                writer.write(data)
                await writer.drain()
            if not self._is_open:
                await self._stuck.wait()


@pytest_asyncio.fixture
async def parts(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Reward, Relay, Client]]:
    """Yields a service, a relay, and a client that reaches the service through the relay.

    Both ends send a ping after two seconds of silence, and wait four seconds for its answer.
    """
    quick = list((dict(options.OPTIONS) | dict(options.keepalive(2_000, 4_000))).items())
    monkeypatch.setattr(options, "OPTIONS", quick)
    monkeypatch.setattr(client_module, "OPTIONS", quick)
    server, reward = Server(), Reward()
    reward_pb2_grpc.add_RewardServiceServicer_to_server(reward, server.grpc)
    relay = Relay(await server.start("127.0.0.1:0", []))
    async with relay.listening() as address:
        client = Client(address, reward_pb2_grpc.RewardServiceStub)
        await client.call(RewardService.GetInfo, pb.GetInfoRequest(), timeout_s=PATIENCE_S)
        yield reward, relay, client
        await client.close()
        await server.grpc.stop(0)


async def test_both_ends_of_a_long_call_notice_the_silence(parts: tuple[Reward, Relay, Client]) -> None:
    reward, relay, client = parts
    call = asyncio.create_task(client.call(RewardService.OpenRun, pb.OpenRunRequest(), timeout_s=PATIENCE_S))
    await asyncio.wait_for(reward.entered.wait(), PATIENCE_S)
    relay.fall_silent()
    begin = time.monotonic()
    with pytest.raises(Unavailable):
        await call
    await asyncio.wait_for(reward.canceled.wait(), PATIENCE_S)
    assert time.monotonic() - begin < LIMIT_S


async def test_silence_is_noticed_while_a_request_is_being_sent(parts: tuple[Reward, Relay, Client]) -> None:
    """Tests the case in which no ping can be sent, because the connection is full."""
    reward, relay, client = parts
    relay.fall_silent()
    begin = time.monotonic()
    request = pb.OpenRunRequest(config_json="x" * (64 << 20))
    with pytest.raises(Unavailable):
        await client.call(RewardService.OpenRun, request, timeout_s=PATIENCE_S)
    assert time.monotonic() - begin < LIMIT_S
    assert not reward.entered.is_set()


def test_the_real_limits_add_up_to_less_than_twenty_seconds() -> None:
    assert options.SILENCE_MS + options.ANSWER_MS < 20_000
    for made in (options.OPTIONS, options.server_options()):
        values = dict(made)
        assert values["grpc.keepalive_time_ms"] == options.SILENCE_MS
        assert values["grpc.keepalive_timeout_ms"] == values["grpc.http2.ping_timeout_ms"] == options.ANSWER_MS
        # A server ends connections on which it is pinged more often than this.
        assert values["grpc.http2.min_ping_interval_without_data_ms"] < options.SILENCE_MS


async def test_a_client_with_a_connection_of_its_own_is_answered_while_that_of_others_is_half_open() -> None:
    server = Server()
    reward_pb2_grpc.add_RewardServiceServicer_to_server(Reward(), server.grpc)
    proxy = Proxy(await server.start("127.0.0.1:0", [RewardService.__name__]))
    address = await proxy.start()
    first, second, alone = (
        Client(address, reward_pb2_grpc.RewardServiceStub, is_alone=how) for how in (False, False, True)
    )
    try:
        await first.call(RewardService.GetInfo, pb.GetInfoRequest(), timeout_s=PATIENCE_S, wait_for_ready=True)
        proxy.silence()
        with pytest.raises(DeadlineExceeded):
            await second.call(RewardService.GetInfo, pb.GetInfoRequest(), timeout_s=1)
        await alone.call(RewardService.GetInfo, pb.GetInfoRequest(), timeout_s=PATIENCE_S)
    finally:
        for client in (first, second, alone):
            await client.close()
        await proxy.close()
        await server.grpc.stop(None)
