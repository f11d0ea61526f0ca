"""Calls every method of every service, from the descriptors, with every kind of certificate."""

import asyncio
import datetime
import importlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from services.common.errors import PermissionDenied, Reason, from_rpc_error
from services.common.rpc.tls import CERTIFICATE_FILE, KEY_FILE, MAY_CALL, Role, roles_in
from services.coordinator.cli.certs import CA_KEY_FILE
from tests.common.rpc.tls_harness import METHODS, SERVICES, UNLISTED, Certificates, call, calls, channel, serve
from tests.support import PATIENCE_S, ROOT

PROTOS = ROOT / "protos"
DENIED, UNAVAILABLE = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAVAILABLE


def expected(method: str) -> set[Role]:
    """Returns the roles that may call a method, written a second time, independently of MAY_CALL."""
    if method.startswith("/lockstep.coordinator."):
        return {Role.OPERATOR, Role.COORDINATOR}
    return set(Role) if method.endswith("/GetInfo") else {Role.COORDINATOR}


@pytest_asyncio.fixture(scope="module")
async def address(certificates: Certificates) -> AsyncIterator[str]:
    server, address = await serve(certificates.of(Role.TRAINER))
    yield address
    await server.grpc.stop(None)


def test_the_table_has_every_method_of_every_service() -> None:
    stubs = sorted(path.relative_to(PROTOS) for path in PROTOS.rglob("*_pb2.py"))
    modules = [importlib.import_module(".".join(path.with_suffix("").parts)) for path in stubs]
    services = [service for module in modules for service in module.DESCRIPTOR.services_by_name.values()]
    assert {f"/{service.full_name}/{method.name}" for service in services for method in service.methods} == set(
        MAY_CALL
    )
    # The watcher's method is served by each server itself, and its call ends with the watcher.
    assert [service.name for service in services if service not in SERVICES] == ["ProgressService"]
    assert MAY_CALL["/lockstep.progress.v1.ProgressService/Watch"] == {Role.COORDINATOR}
    pool = descriptor_pool.Default()
    assert all(pool.FindMethodByName(path[1:].replace("/", ".")) for path in MAY_CALL)
    assert all(MAY_CALL[path] == expected(path) for path in METHODS)


@pytest.mark.parametrize("role", Role)
async def test_a_role_may_call_what_the_table_says_and_nothing_else(certificates, address, role) -> None:
    async with channel(address, certificates.of(role)) as to:
        errors = await calls(to)
    assert {method for method, error in errors.items() if error is None} == {m for m in METHODS if role in expected(m)}
    for method, error in errors.items():
        if error is not None:
            assert error.code() is DENIED
            denied = from_rpc_error(error, target=method)
            assert (type(denied), denied.reason) == (PermissionDenied, Reason.WRONG_ROLE)
            assert denied.metadata == {
                "role": role.value, "method": method, "allowed": " or ".join(sorted(expected(method)))
            }  # fmt: skip
            assert role.value in denied.message
            assert method in denied.message
            issued = Role.OPERATOR if Role.OPERATOR in expected(method) else Role.COORDINATOR
            assert denied.message.endswith(f"; issue one with `lockstep certs issue {issued}`")


async def refused(address: str, directory: Path | None, ca: Path) -> None:
    """Asserts that no handshake succeeds, whatever the method."""
    async with channel(address, directory, ca=ca) as to:
        errors = await calls(to)
    assert {error and error.code() for error in errors.values()} == {UNAVAILABLE}


async def test_without_a_certificate_nothing_can_be_called(certificates, address) -> None:
    await refused(address, None, certificates.ca)


async def test_with_a_certificate_of_another_authority_nothing_can_be_called(certificates, address, tmp_path) -> None:
    other = Certificates(tmp_path)
    await refused(address, other.of(Role.COORDINATOR), certificates.ca)
    # Nor is a service of another authority called.
    await refused(address, certificates.of(Role.COORDINATOR), other.ca)


async def test_with_an_expired_certificate_nothing_can_be_called(certificates, address) -> None:
    await refused(address, certificates.of(Role.COORDINATOR, name="expired", valid_s=-1), certificates.ca)


async def test_in_plaintext_nothing_can_be_called(address) -> None:
    async with grpc.aio.insecure_channel(address) as to:
        assert {error and error.code() for error in (await calls(to)).values()} == {UNAVAILABLE}


async def test_a_service_is_not_called_with_the_certificate_of_an_operator(certificates) -> None:
    """An operator's key is on a laptop, and nobody may impersonate a service with it."""
    server, address = await serve(certificates.of(Role.OPERATOR, "127.0.0.1", name="operator-with-host"))
    await refused(address, certificates.of(Role.COORDINATOR), certificates.ca)
    await server.grpc.stop(None)


async def test_a_method_that_the_table_lacks_is_open_to_nobody(certificates, address) -> None:
    for role in Role:
        async with channel(address, certificates.of(role)) as to:
            error = await call(to, UNLISTED)
            assert error is not None
            assert error.code() is DENIED
            assert "nobody" in error.details()


def _without_role(ca: Path, out: Path) -> Path:
    """Writes to `out` a certificate of `ca` that names a role only where no role is looked for, and returns `out`.

    The role is in its common name, in a URI of another scheme, and in a DNS name.
    """
    key, authority = (
        ec.generate_private_key(ec.SECP256R1()),
        x509.load_pem_x509_certificate((ca / "ca.pem").read_bytes()),
    )
    ca_key = serialization.load_pem_private_key((ca / CA_KEY_FILE).read_bytes(), None)
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.UniformResourceIdentifier("spiffe://role/coordinator"), x509.DNSName("coordinator")]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, Role.COORDINATOR.uri)]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    out.mkdir()
    pem = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (out / KEY_FILE).write_bytes(key.private_bytes(*pem))
    (out / CERTIFICATE_FILE).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return out


async def test_a_certificate_without_a_role_may_call_nothing(certificates, address, tmp_path) -> None:
    async with channel(address, _without_role(certificates.ca, tmp_path / "none"), ca=certificates.ca) as to:
        errors = await calls(to)
    assert {error and error.code() for error in errors.values()} == {DENIED}
    assert all("no role" in error.details() for error in errors.values())


def test_roles_are_read_from_uris() -> None:
    assert roles_in(["https://x", "lockstep://role/trainer", "lockstep://role/admin"]) == {Role.TRAINER}
    assert roles_in(["trainer", "lockstep://role/trainer/x", "LOCKSTEP://role/trainer"]) == set()


async def test_any_valid_certificate_may_ask_for_health_but_not_for_the_schema(certificates, address) -> None:
    for role in Role:
        async with channel(address, certificates.of(role)) as to:
            answer = await health_pb2_grpc.HealthStub(to).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            # Nothing is sent: a message would race with the refusal and, if it lost, be an error inside gRPC.
            call = reflection_pb2_grpc.ServerReflectionStub(to).ServerReflectionInfo(timeout=PATIENCE_S)
            assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
    async with channel(address, None, ca=certificates.ca) as to:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_pb2_grpc.HealthStub(to).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
        assert caught.value.code() is UNAVAILABLE


async def test_in_plaintext_roles_are_not_asked_for() -> None:
    server, address = await serve(None)
    async with grpc.aio.insecure_channel(address) as to:
        assert not any((await calls(to)).values())
    await server.grpc.stop(None)


async def test_roles_are_checked_before_a_stream_is_read(certificates, address) -> None:
    """Tests that a caller without the role for Train is refused before it has sent its batch."""

    async def endless() -> AsyncIterator[bytes]:
        yield b""
        await asyncio.Event().wait()

    async with channel(address, certificates.of(Role.REWARD)) as to:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await to.stream_unary("/lockstep.trainer.v1.TrainerService/Train")(endless(), timeout=PATIENCE_S)
        assert caught.value.code() is DENIED
