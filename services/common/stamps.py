"""Compares policy stamps, which identify weights by version and digest."""

from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.errors import InvalidInput, PreconditionFailed, Reason


def require_stamp(expected: PolicyStamp, held: PolicyStamp, *, who: str) -> None:
    """Enforces the on-policy contract: `held`, the stamp of the service `who`, must equal `expected`."""
    if not expected.digest:
        raise InvalidInput("expected_stamp: required", field="expected_stamp")
    if not held.digest:
        raise PreconditionFailed(f"{who} holds version {held.version}, not published yet", reason=Reason.UNPUBLISHED)
    if expected == held:
        return
    if expected.version < held.version:
        reason = Reason.STALE_STAMP
    elif expected.version > held.version:
        reason = Reason.FUTURE_STAMP
    else:
        reason = Reason.DIGEST_MISMATCH
    raise PreconditionFailed(
        f"{who} holds {show(held)}, not {show(expected)}",
        reason=reason,
        held_version=held.version,
        held_digest=held.digest,
        expected_version=expected.version,
        expected_digest=expected.digest,
    )


def show(stamp: PolicyStamp) -> str:
    return f"version {stamp.version} ({stamp.digest[:8]})"
