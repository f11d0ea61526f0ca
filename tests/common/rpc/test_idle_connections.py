"""Tests a service with many idle connections from a client without a certificate."""

import contextlib
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lockstep.reward.v1 import reward_pb2 as pb
from lockstep.reward.v1 import reward_pb2_grpc
from lockstep.reward.v1.reward_pb2_grpc import RewardServiceServicer as RewardService

from services.common.rpc import channel as options
from services.common.rpc.client import Client
from services.common.rpc.server import Server
from services.common.rpc.tls import Credentials, Role, Transport
from tests.common.rpc.tls_harness import Certificates
from tests.common.telemetry.watched import Service, reward_service
from tests.support import PATIENCE_S

NUM_IDLE = 700
# gRPC gives a connection two minutes for its handshake, unless it is told otherwise.
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@contextlib.contextmanager
def idle_connections(address: str) -> Iterator[list[socket.socket]]:
    host, port = address.split(":")
    with contextlib.ExitStack() as opened:
        yield [opened.enter_context(socket.create_connection((host, int(port)))) for _ in range(NUM_IDLE)]


def client_of(service: Service, certificates: Certificates) -> tuple[Client, str]:
    address = service.until(r"listens on ([\d.:]+)")[1]
    return another(address, certificates), address


def another(address: str, certificates: Certificates) -> Client:
    transport = Transport(Credentials(certificates.of(Role.COORDINATOR)))
    return Client(address, reward_pb2_grpc.RewardServiceStub, transport)


async def open_run(client: Client, run_id: str) -> None:
    config = '{"scorers": [{"kind": "exact"}, {"kind": "math"}], "num_workers": 1}'
    request = pb.OpenRunRequest(run_id=run_id, config_json=config)
    await client.call(RewardService.OpenRun, request, timeout_s=PATIENCE_S)


async def test_a_service_takes_as_many_descriptors_as_it_may(certificates: Certificates) -> None:
    tls = str(certificates.of(Role.REWARD))
    with reward_service("--tls", tls, ulimit="-Sn 512 && ulimit -Hn 4096") as service:
        client, address = client_of(service, certificates)
        assert resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE) == (4096, 4096)
        with idle_connections(address):
            await open_run(client, "r")
            await client.close()
            client = another(address, certificates)
            begin = time.monotonic()
            await client.call(RewardService.GetInfo, pb.GetInfoRequest(), timeout_s=PATIENCE_S)
            assert time.monotonic() - begin < LIMIT_S
            await client.close()


async def test_half_of_few_descriptors_stay_free_for_the_service(certificates: Certificates, tmp_path: Path) -> None:
    with reward_service("--tls", str(certificates.of(Role.REWARD)), ulimit="-n 512") as service:
        client, address = client_of(service, certificates)
        await client.call(RewardService.GetInfo, pb.GetInfoRequest(), timeout_s=PATIENCE_S)
        with idle_connections(address):
            await open_run(client, "r")
            assert len(list(Path(f"/proc/{service.process.pid}/fd").iterdir())) < 512 - 100
        await client.close()


async def test_who_does_not_shake_hands_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options.HANDSHAKE_MS == 20_000
    monkeypatch.setattr(options, "HANDSHAKE_MS", 1_000)
    server = Server()
    port = await server.start("127.0.0.1:0", [])
    begin = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as idle:
        while idle.recv(1 << 10):  # the server's part of the handshake
            pass
    assert time.monotonic() - begin < LIMIT_S
    await server.grpc.stop(0)
