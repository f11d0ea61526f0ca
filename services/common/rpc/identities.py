"""Who may call what: the role in a certificate, and one table with every method of every service.

A role is a URI among the subject alternative names of a certificate, such as `lockstep://role/trainer`.
"""

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum

from google.protobuf.descriptor import FileDescriptor, ServiceDescriptor
from lockstep.coordinator.v1 import coordinator_pb2
from lockstep.reward.v1 import reward_pb2
from lockstep.rollout.v1 import rollout_pb2
from lockstep.trainer.v1 import trainer_pb2

from services.common.errors import PermissionDenied

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
        """How a certificate says it."""
        return f"{_URI_PREFIX}{self.value}"


_ANYONE = frozenset(Role)
_COORDINATOR = frozenset({Role.COORDINATOR})
_OPERATORS = frozenset({Role.OPERATOR, Role.COORDINATOR})


def _table() -> Iterator[tuple[str, frozenset[Role]]]:
    for file in (rollout_pb2, trainer_pb2, reward_pb2):
        for name in _methods(file.DESCRIPTOR):
            yield name, _ANYONE if name.endswith("/GetInfo") else _COORDINATOR
    for name in _methods(coordinator_pb2.DESCRIPTOR):
        yield name, _OPERATORS


def _methods(file: FileDescriptor) -> Iterator[str]:
    services: Mapping[str, ServiceDescriptor] = file.services_by_name
    for service in services.values():
        yield from (f"/{service.full_name}/{method.name}" for method in service.methods)


MAY_CALL: Mapping[str, frozenset[Role]] = dict(_table())
"""Path of a method, as gRPC has it, to the roles that may call it. A method that is not here is open to nobody."""


def roles_in(uris: Iterable[str]) -> frozenset[Role]:
    """The roles among the URIs of a certificate; other URIs say nothing."""
    names = {uri.removeprefix(_URI_PREFIX) for uri in uris if uri.startswith(_URI_PREFIX)}
    return frozenset(role for role in Role if role.value in names)


def require_role(method: str, peer: Mapping[str, Iterable[bytes]]) -> None:
    """Lets a caller pass that may call `method`.

    Args:
        method: Path of the method.
        peer: `ServicerContext.auth_context()`, which gRPC filled from a certificate that it has verified.

    Raises:
        PermissionDenied: WRONG_ROLE, with the caller's roles and those that may.
    """
    allowed = MAY_CALL.get(method, frozenset())
    roles = roles_in(uri.decode(errors="replace") for uri in peer.get("peer_uri", ()))
    if roles & allowed:
        return
    has, needs = " and ".join(sorted(roles)) or "no role", " or ".join(sorted(allowed)) or "nobody"
    raise PermissionDenied(
        f"the caller's certificate is of {has}, and {method} may be called by {needs}; "
        f"issue one with `lockstep certs issue`",
        role=has,
        method=method,
        allowed=needs,
    )
