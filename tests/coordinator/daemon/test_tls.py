"""Tests `lockstep coordinator serve` with certificates: only an operator may start, see and stop runs."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from lockstep.coordinator.v1 import coordinator_pb2 as pb
from lockstep.coordinator.v1 import coordinator_pb2_grpc

from services.common.config.run import Config
from services.common.errors import PermissionDenied, Reason
from services.common.rpc.tls import Credentials, Role, Transport
from services.coordinator.daemon.client import Coordinator
from services.coordinator.fleet.launch import Addresses
from tests.common.rpc.tls_harness import HOST, Certificates, channel
from tests.coordinator.daemon.harness import run_settings
from tests.coordinator.daemon.test_command import Command
from tests.support import PATIENCE_S, free_port, raises

REQUESTS = {
    "StartRun": pb.StartRunRequest(config_json='{"name": "stranger"}'),
    "GetRun": pb.GetRunRequest(name="run"),
    "ListRuns": pb.ListRunsRequest(),
    "WatchRun": pb.WatchRunRequest(name="run"),
    "StopRun": pb.StopRunRequest(name="run", now=True),
    "ListReplicas": pb.ListReplicasRequest(name="run"),
    "ChangeReplicas": pb.ChangeReplicasRequest(name="run"),
    "ReadLog": pb.ReadLogRequest(name="run"),
}
DENIED, UNAVAILABLE = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAVAILABLE


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest_asyncio.fixture(scope="module")
async def address(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """Yields the address of a daemon in its own process."""
    address, directory = f"{HOST}:{free_port()}", tmp_path_factory.mktemp("daemon")
    options = ["--listen", address, "--tls", str(certificates.of(Role.COORDINATOR))]
    daemon = await Command.start(directory, "coordinator", "serve", *options)
    try:
        await daemon.until(f"listens on {address}")
        yield address
    finally:
        daemon.process.kill()
        await daemon.process.wait()


async def codes(to: grpc.aio.Channel) -> dict[str, grpc.StatusCode]:
    """Calls every method and returns the status of each."""
    stub, found = coordinator_pb2_grpc.CoordinatorServiceStub(to), {}
    for method, request in REQUESTS.items():
        calling = getattr(stub, method)(request, timeout=PATIENCE_S)
        try:
            _ = [answer async for answer in calling] if method in ("WatchRun", "ReadLog") else await calling
            found[method] = grpc.StatusCode.OK
        except grpc.aio.AioRpcError as error:
            found[method] = error.code()
    return found


def test_every_method_is_asked_for():
    (service,) = pb.DESCRIPTOR.services_by_name.values()
    assert {method.name for method in service.methods} == {"GetInfo", *REQUESTS}


def operator(certificates: Certificates, address: str) -> Coordinator:
    return Coordinator(address, Transport(Credentials(certificates.of(Role.OPERATOR))))


async def test_an_operator_starts_watches_and_stops_a_run(certificates, address, tmp_path):
    nowhere = f"{HOST}:{free_port()}"
    config = Config(**run_settings(tmp_path))
    async with asyncio.timeout(PATIENCE_S), operator(certificates, address) as coordinator:
        started = await coordinator.start(config, Addresses((nowhere,), reward=(nowhere,), trainer=nowhere))
        assert (started.name, started.state) == ("run", pb.RUN_STATE_STARTING)
        watching = coordinator.watch("run")
        assert (await anext(watching)).run.run_id == started.run_id
        assert [run.name for run in await coordinator.all()] == ["run"]
        # Callers without permission do not stop it.
        for role in (Role.ROLLOUT, Role.TRAINER, Role.REWARD):
            async with channel(address, certificates.of(role)) as to:
                assert set((await codes(to)).values()) == {DENIED}
        assert (await coordinator.get("run")).state == pb.RUN_STATE_STARTING
        await coordinator.stop("run", now=True)
        ended = [answer async for answer in watching][-1]
        assert ended.run.state == pb.RUN_STATE_STOPPED
        assert [run.name for run in await coordinator.all()] == ["run"]


async def test_without_a_certificate_of_the_authority_nothing_is_answered(certificates, address, tmp_path):
    strangers = [
        channel(address, None, ca=certificates.ca),
        channel(address, Certificates(tmp_path).of(Role.OPERATOR), ca=certificates.ca),
        channel(address, certificates.of(Role.OPERATOR, name="expired", valid_s=-1), ca=certificates.ca),
        grpc.aio.insecure_channel(address),
    ]
    for stranger in strangers:
        async with stranger as to:
            assert set((await codes(to)).values()) == {UNAVAILABLE}


async def test_the_wrong_role_is_named_with_the_method(certificates, address):
    as_rollout = Coordinator(address, Transport(Credentials(certificates.of(Role.ROLLOUT))))
    async with as_rollout as coordinator:
        with raises(PermissionDenied, reason=Reason.WRONG_ROLE) as refused:
            await coordinator.stop("run", now=True)
    assert "for rollout, but " in refused.value.message and "/StopRun may only be called by" in refused.value.message
