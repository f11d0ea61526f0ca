"""Reads the credentials of a process from ca.pem, cert.pem and key.pem in a directory, and follows their renewal."""

import contextlib
import datetime
import ipaddress
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from google.protobuf.descriptor import FileDescriptor, ServiceDescriptor
from lockstep.coordinator.v1 import coordinator_pb2
from lockstep.progress.v1 import progress_pb2
from lockstep.reward.v1 import agent_pb2, environment_pb2, reward_pb2
from lockstep.rollout.v1 import rollout_pb2
from lockstep.trainer.v1 import trainer_pb2

from services.common.errors import InvalidInput, PermissionDenied

log = logging.getLogger(__name__)

_URI_PREFIX = "lockstep://role/"


class Role(StrEnum):
    """What the holder of a certificate is."""

    COORDINATOR = "coordinator"
    ROLLOUT = "rollout"
    TRAINER = "trainer"
    REWARD = "reward"
    OPERATOR = "operator"

    @property
    def uri(self) -> str:
        return f"{_URI_PREFIX}{self.value}"


_ANYONE = frozenset(Role)
_COORDINATOR = frozenset({Role.COORDINATOR})
_OPERATORS = frozenset({Role.OPERATOR, Role.COORDINATOR})


def _methods(*files: FileDescriptor) -> Iterator[str]:
    services: Iterator[ServiceDescriptor] = (each for file in files for each in file.services_by_name.values())
    for service in services:
        yield from (f"/{service.full_name}/{method.name}" for method in service.methods)


_SERVED = (
    *(rollout_pb2.DESCRIPTOR, trainer_pb2.DESCRIPTOR, reward_pb2.DESCRIPTOR),
    *(environment_pb2.DESCRIPTOR, agent_pb2.DESCRIPTOR, progress_pb2.DESCRIPTOR),
)
MAY_CALL: Mapping[str, frozenset[Role]] = {
    **{name: _ANYONE if name.endswith("/GetInfo") else _COORDINATOR for name in _methods(*_SERVED)},
    **dict.fromkeys(_methods(coordinator_pb2.DESCRIPTOR), _OPERATORS),
}
"""Maps the gRPC path of each method to the identities that may call it. Nobody may call a method that is not listed."""


def roles_in(uris: Iterable[str]) -> frozenset[Role]:
    """Returns the identities among the URIs of a certificate; other URIs are ignored."""
    names = {uri.removeprefix(_URI_PREFIX) for uri in uris if uri.startswith(_URI_PREFIX)}
    return frozenset(role for role in Role if role.value in names)


def require_role(method: str, peer: Mapping[str, Iterable[bytes]]) -> None:
    """Checks that a caller may call `method`.

    Args:
        method: gRPC path of the method.
        peer: `ServicerContext.auth_context()`, which gRPC fills from a verified certificate.
    """
    allowed = MAY_CALL.get(method, frozenset())
    roles = roles_in(uri.decode(errors="replace") for uri in peer.get("peer_uri", ()))
    if roles & allowed:
        return
    has, needs = " and ".join(sorted(roles)) or "no role", " or ".join(sorted(allowed)) or "nobody"
    # An operator may do less, so it is what to issue where either will do.
    role = Role.OPERATOR if Role.OPERATOR in allowed else min(allowed, default="")
    fix = f"; issue one with `lockstep certs issue {role}`" if role else ""
    raise PermissionDenied(
        f"the caller's certificate is for {has}, but {method} may only be called by {needs}{fix}",
        role=has,
        method=method,
        allowed=needs,
    )


CA_FILE, CERTIFICATE_FILE, KEY_FILE = "ca.pem", "cert.pem", "key.pem"


@dataclass(frozen=True)
class Identity:
    """The contents of the three files, as PEM, and the fields of the certificate."""

    ca: bytes
    certificate: bytes
    key: bytes = field(repr=False)
    roles: frozenset[Role]
    hosts: tuple[str, ...]
    """DNS names and IP addresses that the certificate is valid for, in its order."""
    expires: datetime.datetime


def read_identity(directory: Path) -> Identity:
    """Reads and checks the files in `directory`."""
    ca, certificate, key = (_read(directory / name) for name in (CA_FILE, CERTIFICATE_FILE, KEY_FILE))
    try:
        x509.load_pem_x509_certificates(ca)
        leaf = x509.load_pem_x509_certificate(certificate)
        private = serialization.load_pem_private_key(key, password=None)
        names = _names(leaf)
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.DuplicateExtension) as error:
        raise InvalidInput(
            f"{directory}: the files must be PEM, and the key must have no password: {error}", field="tls"
        ) from error
    ends = [
        public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
        for public in (leaf.public_key(), private.public_key())
    ]
    if ends[0] != ends[1]:
        raise InvalidInput(f"{directory}: {KEY_FILE} is not the key of {CERTIFICATE_FILE}", field="tls")
    roles = roles_in(names.get_values_for_type(x509.UniformResourceIdentifier))
    if not roles:
        wanted = ", ".join(role.uri for role in Role)
        raise InvalidInput(
            f"{directory / CERTIFICATE_FILE} names no role: it needs one of the URIs {wanted}", field="tls"
        )
    hosts = tuple(str(name.value) for name in names if isinstance(name, x509.DNSName | x509.IPAddress))
    return Identity(ca, certificate, key, roles, hosts, leaf.not_valid_after_utc)


class Credentials:
    """The identity in a directory. A renewed certificate is used from the next connection on."""

    def __init__(self, directory: Path):
        """Reads the directory."""
        self.directory = directory
        self._signature = self._file_states()
        self._identity = read_identity(directory)
        if self._identity.expires <= datetime.datetime.now(datetime.UTC):
            raise InvalidInput(
                f"{directory / CERTIFICATE_FILE} expired on {self._identity.expires:%Y-%m-%d %H:%M} UTC; "
                f"renew it with `lockstep certs renew {directory}`",
                field="tls",
            )

    def current(self) -> Identity:
        """Returns the newest identity. While the files are being replaced, it returns the previous one."""
        if (signature := self._file_states()) == self._signature:
            return self._identity
        self._signature = signature  # taken before reading, so that a later write is noticed next time
        try:
            self._identity = read_identity(self.directory)
        except InvalidInput as error:
            log.warning("keeping the previous certificate: %s", error.message)
        else:
            log.info("now using %s, valid until %s", self.directory / CERTIFICATE_FILE, self._identity.expires)
        return self._identity

    def require_role(self, *roles: Role) -> None:
        """Checks that the certificate has one of `roles`, so that a wrong one fails early."""
        if self._identity.roles.isdisjoint(roles):
            has, needs = " and ".join(sorted(self._identity.roles)), " or ".join(roles)
            raise InvalidInput(
                f"--tls {self.directory}: its certificate is for the role {has}, but must be for {needs} here; "
                f"issue one with `lockstep certs issue {roles[0]}`",
                field="tls",
            )

    def for_server(self) -> grpc.ServerCredentials:
        """Returns credentials that require a certificate of every client; every handshake uses the newest files."""
        served = self._identity

        def fetch() -> Any:  # None if there is no other, which grpc's types leave out
            nonlocal served
            if (newest := self.current()) is served:
                return None
            served = newest
            return _configuration(served)

        return grpc.dynamic_ssl_server_credentials(_configuration(served), fetch, require_client_authentication=True)

    def _file_states(self) -> list[tuple[int, int, int]]:
        signature: list[tuple[int, int, int]] = []
        for name in (CA_FILE, CERTIFICATE_FILE, KEY_FILE):
            with contextlib.suppress(OSError):  # a file that is missing for a moment makes the signature shorter
                stat = (self.directory / name).stat()
                signature.append((stat.st_mtime_ns, stat.st_ino, stat.st_size))
        return signature


@dataclass(frozen=True)
class Transport:
    """How connections are secured: by mTLS, or not at all; plaintext leaves the host only if `insecure`."""

    tls: Credentials | None = None
    insecure: bool = False
    name: str = ""
    """Name that the service's certificate must be valid for; by default the host of its address."""


LOCAL = Transport()


def is_address(host: str) -> bool:
    """Returns whether `host` is an IP address instead of a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _names(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return x509.SubjectAlternativeName([])


def _configuration(identity: Identity) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(identity.key, identity.certificate)], identity.ca)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInput(
            f"{path}: {error.strerror}; a directory of credentials has {CA_FILE}, {CERTIFICATE_FILE} and {KEY_FILE}; "
            "create it with `lockstep certs issue`",
            field="tls",
        ) from error
