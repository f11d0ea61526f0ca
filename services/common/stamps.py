"""Compares policy stamps, which identify weights by version and digest."""

from lockstep.types.v1.types_pb2 import PolicyStamp

from services.common.errors import InvalidInput, PreconditionFailed, Reason


def require_stamp(expected: PolicyStamp, actual: PolicyStamp, *, who: str) -> None:
    """Enforces the on-policy contract: `actual`, the stamp of the service `who`, must equal `expected`."""
    if not expected.digest:
        raise InvalidInput("expected_stamp: required", field="expected_stamp")
    if not actual.digest:
        raise PreconditionFailed(f"{who} holds version {actual.version}, not published yet", reason=Reason.UNPUBLISHED)
    if expected == actual:
        return
    reason = Reason.STALE_STAMP if expected.version < actual.version else Reason.FUTURE_STAMP
    if expected.version == actual.version:  # the same number, but other weights
        reason = Reason.DIGEST_MISMATCH
    raise PreconditionFailed(
        f"{who} holds {show(actual)}, not {show(expected)}",
        reason=reason,
        held_version=actual.version,
        held_digest=actual.digest,
        expected_version=expected.version,
        expected_digest=expected.digest,
    )


def show(stamp: PolicyStamp) -> str:
    return f"version {stamp.version} ({stamp.digest[:8]})"
