"""Reads the roles in requests."""

from collections.abc import Mapping

from lockstep.trainer.v1 import trainer_pb2 as pb

from services.common.errors import InvalidInput
from services.trainer.backend import Role

ROLES: Mapping[int, Role] = {
    pb.ROLE_UNSPECIFIED: Role.POLICY,
    pb.ROLE_POLICY: Role.POLICY,
    pb.ROLE_REFERENCE: Role.REFERENCE,
    pb.ROLE_CRITIC: Role.CRITIC,
}
"""The role of each number of the protos."""


def role_of(number: int, *, is_trained: bool = False) -> Role:
    """Returns the role of a number; with `is_trained`, of a role that is trained.

    Raises:
        InvalidInput: It is no such role.
    """
    role = ROLES.get(number)
    if role is None or (is_trained and role is Role.REFERENCE):
        known = "policy or critic" if is_trained else "policy, reference or critic"
        raise InvalidInput(f"role: must be {known}", field="role")
    return role
