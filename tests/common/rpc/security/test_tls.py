"""Tests which connections succeed, and the error messages of those that fail."""

import asyncio
import contextlib
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytest_asyncio
from lockstep.reward.v1 import reward_pb2 as pb
from lockstep.reward.v1 import reward_pb2_grpc
from lockstep.reward.v1.reward_pb2_grpc import RewardServiceServicer as RewardService
from lockstep.types.v1.types_pb2 import FINISH_REASON_STOP, Completion, PolicyStamp

from services.common.config.run import Config
from services.common.errors import InvalidInput, PermissionDenied, Reason, Unauthenticated, Unavailable
from services.common.rpc import channel
from services.common.rpc.address import require_secure
from services.common.rpc.channel import require_mutual_trust
from services.common.rpc.client import Client
from services.common.rpc.command import serve_from_command_line
from services.common.rpc.server import Server
from services.common.rpc.tls import Credentials, Role, Transport
from services.coordinator.cli.main import main
from services.coordinator.clients.reward import Reward
from services.coordinator.data.groups import SampledGroup
from services.coordinator.fleet.launch import Addresses, launch
from tests.common.rpc.tls_harness import HOST, Certificates, serve
from tests.coordinator.fake_services import make_config, make_prompt
from tests.support import PATIENCE_S, free_port, raises


@pytest_asyncio.fixture(scope="module")
async def address(certificates: Certificates) -> AsyncIterator[str]:
    server, address = await serve(certificates.of(Role.REWARD))
    yield address
    await server.grpc.stop(None)


def mtls(directory: Path) -> Transport:
    return Transport(Credentials(directory))


async def score(address: str, transport: Transport, *, timeout_s: float = PATIENCE_S) -> pb.ScoreResponse:
    client = Client(address, reward_pb2_grpc.RewardServiceStub, transport)
    try:
        return await client.call(RewardService.Score, pb.ScoreRequest(), timeout_s=timeout_s, wait_for_ready=True)
    finally:
        await client.close()


async def test_two_ends_of_one_authority_talk(certificates, address) -> None:
    assert await score(address, mtls(certificates.of(Role.COORDINATOR))) == pb.ScoreResponse()


async def test_the_wrong_role_arrives_typed(certificates, address) -> None:
    with raises(PermissionDenied) as caught:
        await score(address, mtls(certificates.of(Role.REWARD)))
    method = "/lockstep.reward.v1.RewardService/Score"
    assert caught.value.metadata == {"role": "reward", "method": method, "allowed": "coordinator"}


async def unauthenticated(address: str, transport: Transport) -> str:
    """Returns the message with which a call fails at once; after gRPC's deadline the error would be Unavailable."""
    with pytest.raises(Unauthenticated) as caught:
        await score(address, transport)
    assert caught.value.reason is Reason.BAD_CERTIFICATE
    assert address in caught.value.message
    return caught.value.message


async def test_a_name_that_the_certificate_lacks_is_named_with_the_fix(certificates, address) -> None:
    why = await unauthenticated(address.replace(HOST, "localhost"), mtls(certificates.of(Role.COORDINATOR)))
    assert "not valid for 'localhost'" in why
    assert "--host localhost" in why


async def test_a_service_may_be_called_by_name_or_by_address(certificates) -> None:
    server, address = await serve(certificates.of(Role.REWARD, HOST, "localhost", name="two-names"))
    for host in (HOST, "localhost"):
        await score(address.replace(HOST, host), mtls(certificates.of(Role.COORDINATOR)))
    await server.grpc.stop(None)


async def test_another_authority_is_named_on_both_ends(certificates, address, tmp_path) -> None:
    other = Certificates(tmp_path)
    why = await unauthenticated(address, mtls(other.of(Role.COORDINATOR)))
    assert "certificate of the service is refused" in why
    assert "ca.pem" in why
    # This client trusts the service, but the service does not trust the client's certificate.
    both = other.of(Role.COORDINATOR, name="both")
    (both / "ca.pem").write_bytes((certificates.ca / "ca.pem").read_bytes())
    why = await unauthenticated(address, mtls(both))
    assert "the service refuses this certificate" in why
    assert "renew" in why


async def test_plaintext_and_tls_do_not_wait_for_each_other(certificates, address) -> None:
    assert "pass --tls" in await unauthenticated(address, Transport())
    server, plain = await serve(None)
    assert "started with --tls" in await unauthenticated(plain, mtls(certificates.of(Role.COORDINATOR)))
    await server.grpc.stop(None)


async def test_a_service_that_is_not_there_is_waited_for(certificates, monkeypatch) -> None:
    tried_in_vain = asyncio.Event()

    async def explain(*ends: object) -> str:
        tried_in_vain.set()
        return await require_mutual_trust(*ends)

    port, transport = free_port(), mtls(certificates.of(Role.COORDINATOR))
    with pytest.raises(Unavailable, match="no connection within"):
        await score(f"{HOST}:{port}", transport, timeout_s=0.3)
    monkeypatch.setattr(channel, "require_mutual_trust", explain)
    waiting = asyncio.create_task(score(f"{HOST}:{port}", transport))
    await tried_in_vain.wait()
    server, _ = await serve(certificates.of(Role.REWARD), port)
    await waiting
    await server.grpc.stop(None)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_a_client_sends_no_plaintext_to_another_host(certificates, host) -> None:
    address = f"{host}:50051"
    with raises(InvalidInput, field="address"):
        Client(address, reward_pb2_grpc.RewardServiceStub)
    with raises(InvalidInput, field="--reward"):
        require_secure(address, Transport(), field="--reward")
    require_secure(address, Transport(insecure=True), field="--reward")
    require_secure(address, mtls(certificates.of(Role.COORDINATOR)), field="--reward")


async def test_mtls_is_served_off_loopback(certificates) -> None:
    server = Server(tls=Credentials(certificates.of(Role.REWARD)))
    port = await server.start("0.0.0.0:0", [])
    await server.grpc.stop(None)
    assert port > 0


def said(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> str:
    """Runs the `lockstep` command, which must end with exit code 2, and returns what it writes to stderr."""
    monkeypatch.setattr(sys, "argv", ["lockstep", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    return capfd.readouterr().err


@pytest.mark.parametrize("command", [["run"], ["sft"], ["eval", "model"]])
def test_the_command_refuses_before_anything_is_started(command, certificates, capfd, monkeypatch) -> None:
    def refusal(*options: object) -> str:
        return said(capfd, monkeypatch, *command, "no-such.yaml", *options)

    off = ["--trainer", "192.0.2.1:1"]
    assert "--trainer: 192.0.2.1:1 is not on this host" in refusal(*off)
    assert "no-such.yaml" in refusal(*off, "--insecure")
    assert "no-such.yaml" in refusal(*off, "--tls", certificates.of(Role.COORDINATOR))
    assert "exclude each other" in refusal("--insecure", "--tls", certificates.of(Role.COORDINATOR))
    assert "certificate is for the role trainer" in refusal("--tls", certificates.of(Role.TRAINER))
    assert "ca.pem" in refusal("--tls", certificates.root / "none")
    certificates.of(Role.COORDINATOR, name="torn").joinpath("key.pem").write_text("-----BEGIN")
    assert "PEM" in refusal("--tls", certificates.root / "torn")


async def _never(options: object) -> int:
    raise AssertionError


def test_a_service_refuses_a_certificate_that_is_not_its_own(certificates, capsys: pytest.CaptureFixture[str]) -> None:
    def start(*arguments: object) -> str:
        with pytest.raises(SystemExit) as caught:
            serve_from_command_line("reward", _never, list(map(str, arguments)))
        assert caught.value.code == 2
        return capsys.readouterr().err

    assert "for the role trainer, but must be for reward or coordinator here" in start(
        "--tls", certificates.of(Role.TRAINER)
    )
    expired = certificates.of(Role.REWARD, name="expired", valid_s=-60)
    assert re.search(f"expired on .*`lockstep certs renew {expired}`", start("--tls", expired))
    assert "--insecure" in start("--tls", expired, "--insecure")


@contextlib.asynccontextmanager
async def reward_process(directory: Path) -> AsyncIterator[str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.reward", "--listen", f"{HOST}:0", "--tls", str(directory),
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        while not (port := re.search(rb"listens on 127\.0\.0\.1:(\d+)", line := await process.stderr.readline())):
            assert line, "the service ended"
        yield f"{HOST}:{int(port[1])}"
    finally:
        process.terminate()
        await process.communicate()


_GROUP = SampledGroup(
    0,
    make_prompt(7),
    [Completion(tokens=[token], logprobs=[-1.0], finish_reason=FINISH_REASON_STOP) for token in (7, 8)],
    PolicyStamp(),
)
_TOKENIZER = SimpleNamespace(
    has_token=lambda text: False, decode_batch=lambda texts: ["".join(map(str, tokens)) for tokens in texts]
)


async def rewards(address: str, config: Config, transport: Transport) -> list[float]:
    """Returns the rewards that the coordinator's own client gets from the service."""
    reward = Reward(address, config, transport)
    try:
        await reward.open("run")
        scored = await reward.score(_GROUP, _TOKENIZER)
        return [score.reward for score in scored.scores]
    finally:
        await reward.close()


async def test_a_coordinator_scores_with_a_reward_service_over_mtls(certificates) -> None:
    """Tests both ends as they are in a run: the coordinator's own client, and a process as an operator starts it."""
    config = make_config(reward={"scorers": [{"kind": "exact"}], "num_workers": 1})
    async with reward_process(certificates.of(Role.REWARD)) as address:
        assert await rewards(address, config, mtls(certificates.of(Role.COORDINATOR))) == [1.0, 0.0]
        with pytest.raises(PermissionDenied):
            await rewards(address, config, mtls(certificates.of(Role.ROLLOUT)))
        with raises(Unauthenticated):
            await rewards(address, config, Transport())


async def test_a_service_that_a_run_starts_serves_mtls(certificates, tmp_path) -> None:
    config = make_config(runs_dir=tmp_path, reward={"scorers": [{"kind": "exact"}], "num_workers": 1})
    transport = mtls(certificates.of(Role.COORDINATOR))
    addresses = Addresses(rollout=(f"{HOST}:1",), trainer=f"{HOST}:1", transport=transport)
    async with launch(config, addresses) as fleet:
        assert fleet.addresses.transport is transport
        assert await rewards(fleet.addresses.reward[0], config, transport) == [1.0, 0.0]
        with raises(Unauthenticated):
            await rewards(fleet.addresses.reward[0], config, Transport())


async def test_a_service_is_called_at_an_address_by_the_name_in_its_certificate(certificates) -> None:
    """Replicas that were found under a DNS name are called in this way."""
    named = certificates.of(Role.REWARD, "reward.svc", name="named")
    config = make_config(reward={"scorers": [{"kind": "exact"}], "num_workers": 1})
    by_address = mtls(certificates.of(Role.COORDINATOR))
    async with reward_process(named) as address:
        assert await rewards(address, config, replace(by_address, name="reward.svc")) == [1.0, 0.0]
        for transport in (by_address, replace(by_address, name="trainer.svc")):
            with pytest.raises(Unauthenticated, match="is not valid for"):
                await rewards(address, config, transport)
