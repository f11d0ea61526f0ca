"""Certificates are renewed, and the old ones expire, while calls go on."""

import asyncio
import datetime
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from lockstep.rollout.v1 import rollout_pb2 as pb
from lockstep.rollout.v1 import rollout_pb2_grpc
from lockstep.rollout.v1.rollout_pb2_grpc import RolloutServiceServicer as RolloutService

from services.common.errors import InvalidInput, Unauthenticated
from services.common.rpc.client import Client
from services.common.rpc.identities import Role
from services.common.rpc.server import Server
from services.common.rpc.tls import CERTIFICATE_FILE, KEY_FILE, Credentials, Transport
from services.coordinator.certs.authority import renew
from tests.common.rpc.tls_harness import HOST, Certificates

VALID_S = 4.0


class Rollout(rollout_pb2_grpc.RolloutServiceServicer):
    """Notes with which certificate it is called."""

    def __init__(self) -> None:
        self.callers: list[bytes] = []
        self.gate = asyncio.Event()

    async def GetInfo(self, request: Any, context: Any) -> pb.GetInfoResponse:
        (caller,) = context.auth_context()["x509_pem_cert"]
        self.callers.append(caller)
        return pb.GetInfoResponse()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(prompt_id="before")
        await self.gate.wait()
        yield pb.GenerateResponse(prompt_id="after")


class Deployment:
    """A replica and those who call it, with certificates that expire VALID_S from now."""

    def __init__(self, root: Path):
        self.certificates = Certificates(root)
        self.service = self.certificates.of(Role.ROLLOUT, valid_s=VALID_S)
        self.coordinator = self.certificates.of(Role.COORDINATOR, valid_s=VALID_S)
        self.transport = Transport(Credentials(self.coordinator))
        self.rollout, self.address = Rollout(), f"{HOST}:0"

    async def start(self) -> None:
        """Listens, the second time on the same port."""
        self.server = Server(tls=Credentials(self.service))
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(self.rollout, self.server.grpc)
        self.address = f"{HOST}:{await self.server.start(self.address, [])}"

    def client(self) -> Client:
        return Client(self.address, rollout_pb2_grpc.RolloutServiceStub, self.transport)

    def renew(self) -> None:
        for directory in (self.service, self.coordinator):
            renew(self.certificates.ca, directory)

    async def until_the_first_expire(self) -> None:
        end = max(Credentials(directory).current().expires for directory in (self.service, self.coordinator))
        await asyncio.sleep((end - datetime.datetime.now(datetime.UTC)).total_seconds() + 0.2)


async def info(client: Client, **options: bool) -> None:
    await client.call(RolloutService.GetInfo, pb.GetInfoRequest(), timeout_s=10, **options)


async def test_no_call_fails_while_certificates_are_renewed_and_expire(tmp_path) -> None:
    deployment = Deployment(tmp_path)
    await deployment.start()
    kept, counts, stop = deployment.client(), {"kept": 0, "new": 0}, asyncio.Event()

    async def over_one_channel() -> None:
        while not stop.is_set():
            await info(kept)
            counts["kept"] += 1
            await asyncio.sleep(0.002)

    async def over_new_connections() -> None:
        while not stop.is_set():
            client = deployment.client()
            await info(client)
            await client.close()
            counts["new"] += 1
            await asyncio.sleep(0.01)

    stream = kept.stream(RolloutService.Generate, pb.GenerateRequest(), timeout_s=30)
    assert (await anext(stream)).prompt_id == "before"
    (before,) = await _callers(deployment, kept)
    expiry = asyncio.create_task(deployment.until_the_first_expire())
    calling = [asyncio.create_task(over_one_channel()), asyncio.create_task(over_new_connections())]
    await _until_both_call_again(counts, calling)
    deployment.renew()
    await _until_both_call_again(counts, calling)
    await expiry
    await _until_both_call_again(counts, calling)
    stop.set()
    await asyncio.gather(*calling)
    # The channel that was there before calls with the new certificate; the call that was in progress goes on.
    (after,) = await _callers(deployment, kept)
    assert after == (deployment.coordinator / CERTIFICATE_FILE).read_bytes() != before
    deployment.rollout.gate.set()
    assert [answer.prompt_id async for answer in stream] == ["after"]
    # The service comes back after the first certificates have expired.
    await deployment.server.grpc.stop(None)
    await deployment.start()
    await info(kept, wait_for_ready=True)
    await kept.close()
    await deployment.server.grpc.stop(None)


async def _until_both_call_again(counts: dict[str, int], calling: list[asyncio.Task[None]]) -> None:
    before = dict(counts)
    async with asyncio.timeout(20):
        while any(counts[kind] < before[kind] + 2 for kind in counts):
            await asyncio.sleep(0.01)
            for task in calling:
                if task.done():
                    task.result()  # raises what a call has raised


async def _callers(deployment: Deployment, client: Client) -> list[bytes]:
    deployment.rollout.callers.clear()
    await info(client)
    return list(deployment.rollout.callers)


async def test_without_renewal_connections_go_on_and_new_ones_are_refused(tmp_path) -> None:
    deployment = Deployment(tmp_path)
    await deployment.start()
    kept, late = deployment.client(), deployment.client()
    await info(kept)
    await deployment.until_the_first_expire()
    await info(kept)
    with pytest.raises(Unauthenticated, match="expired"):
        await info(late)
    for client in (kept, late):
        await client.close()
    await deployment.server.grpc.stop(None)


def test_half_written_files_are_not_used(tmp_path, caplog) -> None:
    certificates = Certificates(tmp_path)
    directory, other = certificates.of(Role.REWARD), certificates.of(Role.REWARD, name="other")
    credentials = Credentials(directory)
    first = credentials.current()
    for name, content in [
        (CERTIFICATE_FILE, first.certificate[: len(first.certificate) // 2]),
        (CERTIFICATE_FILE, (other / CERTIFICATE_FILE).read_bytes()),  # of another key
        (CERTIFICATE_FILE, first.certificate),
        (KEY_FILE, b""),
    ]:
        (directory / name).write_bytes(content)
        with caplog.at_level(logging.WARNING):
            assert credentials.current().certificate == first.certificate
    (directory / KEY_FILE).unlink()
    num_warnings = len(caplog.records)
    assert [credentials.current().key for _ in range(3)] == [first.key] * 3
    assert len(caplog.records) == num_warnings + 1  # once, not with every call
    for name in (KEY_FILE, CERTIFICATE_FILE):
        (directory / name).write_bytes((other / name).read_bytes())
    assert credentials.current().certificate == (other / CERTIFICATE_FILE).read_bytes()
    (directory / KEY_FILE).unlink()
    with pytest.raises(InvalidInput, match=r"key\.pem"):  # a new process has nothing to go on with
        Credentials(directory)
