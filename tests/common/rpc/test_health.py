"""Tests the health check of containers."""

import contextlib
from pathlib import Path

import pytest

from services.common.errors import InvalidInput, Unauthenticated, Unavailable
from services.common.rpc.health import main, require_serving
from services.common.rpc.server import Server
from services.common.rpc.tls import LOCAL, Role
from tests.common.rpc.tls_harness import Certificates, serve
from tests.coordinator.fake_services import replicas
from tests.support import PATIENCE_S


async def test_a_service_that_serves_is_healthy_and_one_that_ended_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")  # no call of a run goes through a proxy
    monkeypatch.setenv("no_proxy", ".corp")
    async with replicas(1) as (fake,):
        address = fake.address
        await require_serving(address, LOCAL, timeout_s=PATIENCE_S)
    with pytest.raises(Unavailable):
        await require_serving(address, LOCAL, timeout_s=PATIENCE_S)


async def test_a_name_by_which_only_this_host_reaches_a_service_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("socket.gethostbyname", lambda name: "127.0.1.1")
    for address in ("127.0.0.1:0", "localhost:0", "[::1]:0", "no-such-host.invalid:0"):
        server = Server()
        with contextlib.suppress(InvalidInput):
            await server.start(address, ["service"])
        assert ("other hosts cannot connect" in caplog.text) == ("invalid" in address)
        await server.grpc.stop(None)


async def test_a_service_that_wants_certificates_says_so(tmp_path: Path) -> None:
    server, address = await serve(Certificates(tmp_path).of(Role.REWARD))
    with pytest.raises(Unauthenticated, match="the service requires mTLS: pass --tls"):
        await require_serving(address, LOCAL, timeout_s=PATIENCE_S)
    await server.grpc.stop(None)


def test_plaintext_to_another_host_needs_the_flag_that_the_message_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"192\.0\.2\.1:1 is not on this host.* or --insecure"):
        main(["192.0.2.1:1"])
    with pytest.raises(SystemExit, match=r"lockstep-health: (?!.*--insecure)"):
        main(["192.0.2.1:1", "--insecure", "--timeout", "0.1"])


def test_the_command_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"lockstep-health: .*127\.0\.0\.1:1"):
        main(["127.0.0.1:1", "--timeout", f"{PATIENCE_S}"])
