"""Decides who may call what, by the identity in a certificate and one table with every method of every service.

An identity (class `Role`) is a URI among a certificate's subject alternative names, such as `lockstep://role/trainer`.
"""

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum

from google.protobuf.descriptor import FileDescriptor, ServiceDescriptor
from lockstep.coordinator.v1 import coordinator_pb2
from lockstep.reward.v1 import environment_pb2, reward_pb2
from lockstep.rollout.v1 import rollout_pb2
from lockstep.trainer.v1 import trainer_pb2

from services.common.errors import PermissionDenied

_URI_PREFIX = "lockstep://role/"


class Role(StrEnum):
    """Identifies what the holder of a certificate is."""

    COORDINATOR = "coordinator"
    ROLLOUT = "rollout"
    TRAINER = "trainer"
    REWARD = "reward"
    OPERATOR = "operator"

    @property
    def uri(self) -> str:
        """Returns the URI that names this identity in a certificate."""
        return f"{_URI_PREFIX}{self.value}"


_ANYONE = frozenset(Role)
_COORDINATOR = frozenset({Role.COORDINATOR})
_OPERATORS = frozenset({Role.OPERATOR, Role.COORDINATOR})


def _table() -> Iterator[tuple[str, frozenset[Role]]]:
    for file in (rollout_pb2, trainer_pb2, reward_pb2, environment_pb2):
        for name in _methods(file.DESCRIPTOR):
            yield name, _ANYONE if name.endswith("/GetInfo") else _COORDINATOR
    for name in _methods(coordinator_pb2.DESCRIPTOR):
        yield name, _OPERATORS


def _methods(file: FileDescriptor) -> Iterator[str]:
    services: Mapping[str, ServiceDescriptor] = file.services_by_name
    for service in services.values():
        yield from (f"/{service.full_name}/{method.name}" for method in service.methods)


MAY_CALL: Mapping[str, frozenset[Role]] = dict(_table())
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

    Raises:
        PermissionDenied: WRONG_ROLE, with the caller's identities and those that may call the method.
    """
    allowed = MAY_CALL.get(method, frozenset())
    roles = roles_in(uri.decode(errors="replace") for uri in peer.get("peer_uri", ()))
    if roles & allowed:
        return
    has, needs = " and ".join(sorted(roles)) or "no role", " or ".join(sorted(allowed)) or "nobody"
    # An operator may do less, so it is what to issue where either will do.
    role = Role.OPERATOR if Role.OPERATOR in allowed else min(allowed, default="")
    advice = f"; issue one with `lockstep certs issue {role}`" if role else ""
    raise PermissionDenied(
        f"the caller's certificate is for {has}, but {method} may only be called by {needs}{advice}",
        role=has,
        method=method,
        allowed=needs,
    )
