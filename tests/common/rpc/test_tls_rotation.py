"""Certificates are renewed, and the old ones expire, while calls go on."""

import asyncio
import contextlib
import datetime
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from lockstep.rollout.v1 import rollout_pb2 as pb
from lockstep.rollout.v1 import rollout_pb2_grpc
from lockstep.rollout.v1.rollout_pb2_grpc import RolloutServiceServicer as RolloutService

from services.common.errors import InvalidInput, Reason, Unauthenticated, Unavailable
from services.common.rpc.client import Client
from services.common.rpc.server import Server
from services.common.rpc.tls import CERTIFICATE_FILE, KEY_FILE, Credentials, Role, Transport
from services.coordinator.cli.certs import renew
from tests.common.rpc.tls_harness import HOST, Certificates
from tests.support import PATIENCE_S, free_port, raises, until

# The setup must finish before the certificates expire; a busy machine may need more than the first.
VALIDITIES_S = (4.0, 30.0, 120.0)


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


class TooSlow(Exception):
    """Raised if the first certificates expired before the test was ready."""


class Deployment:
    """A replica and those who call it, with certificates that expire `valid_s` from now."""

    def __init__(self, root: Path, valid_s: float):
        self.certificates = Certificates(root)
        self.service = self.certificates.of(Role.ROLLOUT, valid_s=valid_s)
        self.coordinator = self.certificates.of(Role.COORDINATOR, valid_s=valid_s)
        expire = [Credentials(directory).current().expires for directory in (self.service, self.coordinator)]
        self.first_expiry, self.last_expiry = min(expire), max(expire)
        self.transport = Transport(Credentials(self.coordinator))
        self.rollout, self.address = Rollout(), f"{HOST}:{free_port()}"

    async def start(self) -> None:
        """Listens, the second time on the same port."""
        self.server = Server(tls=Credentials(self.service))
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(self.rollout, self.server.grpc)
        await self.server.start(self.address, [])

    def client(self) -> Client:
        return Client(self.address, rollout_pb2_grpc.RolloutServiceStub, self.transport)

    def renew(self) -> None:
        for directory in (self.service, self.coordinator):
            renew(self.certificates.ca, directory)

    @contextlib.asynccontextmanager
    async def before_expiry(self) -> AsyncIterator[None]:
        """Raises TooSlow if the first certificates have expired at the end of the block, whatever failed in it."""
        try:
            yield
        finally:
            if datetime.datetime.now(datetime.UTC) > self.first_expiry:
                raise TooSlow

    async def until_the_first_expire(self) -> None:
        await asyncio.sleep((self.last_expiry - datetime.datetime.now(datetime.UTC)).total_seconds() + 0.2)


async def info(client: Client, **options: bool) -> None:
    await client.call(RolloutService.GetInfo, pb.GetInfoRequest(), timeout_s=PATIENCE_S, **options)


class Callers:
    """Calls again and again, over one channel and over a new channel for each call, until it is stopped."""

    def __init__(self, deployment: Deployment, connected: Client):
        self._deployment, self._connected, self._stop = deployment, connected, asyncio.Event()
        self._counts = {"connected": 0, "new": 0}
        self._calling = [asyncio.create_task(self._over_one_channel()), asyncio.create_task(self._over_new_ones())]

    async def _over_one_channel(self) -> None:
        while not self._stop.is_set():
            await info(self._connected)
            self._counts["connected"] += 1
            await asyncio.sleep(0.002)

    async def _over_new_ones(self) -> None:
        while not self._stop.is_set():
            client = self._deployment.client()
            await info(client)
            await client.close()
            self._counts["new"] += 1
            await asyncio.sleep(0.01)

    async def until_both_call_again(self) -> None:
        """Waits for two more calls of each kind; raises the error of a call that failed."""
        wanted = {kind: count + 2 for kind, count in self._counts.items()}
        await until(
            lambda: (
                any(task.done() for task in self._calling)
                or all(self._counts[kind] >= count for kind, count in wanted.items())
            )
        )
        for task in self._calling:
            if task.done():
                task.result()

    async def end(self) -> None:
        self._stop.set()
        await asyncio.gather(*self._calling)


@contextlib.asynccontextmanager
async def deployed(root: Path, valid_s: float) -> AsyncIterator[tuple[Deployment, Client]]:
    """Starts a deployment. Yields it and a client that is connected to it."""
    try:
        deployment = Deployment(root / f"{valid_s:g}", valid_s)
    except InvalidInput as error:
        raise TooSlow from error
    connected = deployment.client()
    try:
        async with deployment.before_expiry():
            await deployment.start()
            await info(connected)
        yield deployment, connected
    finally:
        await connected.close()
        await deployment.server.grpc.stop(None)


async def in_time(attempt: Callable[[float], Awaitable[None]]) -> None:
    """Runs `attempt` with a longer validity each time that it was too slow."""
    for valid_s in VALIDITIES_S:
        with contextlib.suppress(TooSlow):
            return await attempt(valid_s)
    raise TooSlow


@pytest.mark.slow
async def test_no_call_fails_while_certificates_are_renewed_and_expire(tmp_path) -> None:
    async def attempt(valid_s: float) -> None:
        async with deployed(tmp_path, valid_s) as (deployment, connected):
            stream = connected.stream(RolloutService.Generate, pb.GenerateRequest(), timeout_s=3 * PATIENCE_S)
            async with deployment.before_expiry():
                assert (await anext(stream)).prompt_id == "before"
                (before,) = await _callers(deployment, connected)
                callers = Callers(deployment, connected)
                await callers.until_both_call_again()
                deployment.renew()
                await callers.until_both_call_again()
            await deployment.until_the_first_expire()
            await callers.until_both_call_again()
            await callers.end()
            # The channel that was there before calls with the new certificate; the call that was in progress goes on.
            (after,) = await _callers(deployment, connected)
            assert after == (deployment.coordinator / CERTIFICATE_FILE).read_bytes() != before
            deployment.rollout.gate.set()
            assert [answer.prompt_id async for answer in stream] == ["after"]
            # The service comes back after the first certificates have expired.
            await deployment.server.grpc.stop(None)
            await deployment.start()
            await info(connected, wait_for_ready=True)

    await in_time(attempt)


async def _callers(deployment: Deployment, client: Client) -> list[bytes]:
    deployment.rollout.callers.clear()
    await info(client)
    return list(deployment.rollout.callers)


@pytest.mark.slow
async def test_without_renewal_connections_go_on_and_new_ones_are_refused(tmp_path) -> None:
    async def attempt(valid_s: float) -> None:
        async with deployed(tmp_path, valid_s) as (deployment, connected):
            late = deployment.client()
            await deployment.until_the_first_expire()
            await info(connected)
            with pytest.raises(Unauthenticated, match="expired"):
                await info(late)
            await late.close()
            # A connection that is lost is refused when it is made again. The service is lost then, as one that ended.
            renew(deployment.certificates.ca, deployment.service)
            await deployment.server.grpc.stop(None)
            await deployment.start()
            with pytest.raises(Unavailable, match="refuses this certificate") as caught:
                await connected.call(
                    RolloutService.GetInfo, pb.GetInfoRequest(), timeout_s=PATIENCE_S, max_retry_s=PATIENCE_S
                )
            assert caught.value.reason is Reason.BAD_CERTIFICATE

    await in_time(attempt)


async def test_half_written_files_do_not_hide_that_a_service_is_gone(tmp_path) -> None:
    deployment = Deployment(tmp_path, 3600)
    client = deployment.client()
    (deployment.coordinator / KEY_FILE).write_bytes((deployment.service / KEY_FILE).read_bytes())
    with pytest.raises(Unavailable, match="failed to connect"):
        await info(client)
    await client.close()


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
    with raises(InvalidInput, field="tls"):  # a new process has nothing to go on with
        Credentials(directory)
