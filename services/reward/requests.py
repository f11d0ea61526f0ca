"""Checks the fields that requests have in common, and refuses wrong ones."""

import json

from lockstep.types.v1 import types_pb2

from services.common.errors import InvalidInput, PreconditionFailed, Reason

_FINISH_REASONS = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_TURN_LIMIT: "turn_limit",
}


def require_run(run_id: str, opened_run_id: str) -> None:
    """Checks that the caller's run is the one that is open.

    Raises:
        PreconditionFailed: RUN_NOT_OPEN if no run is open, SCORER_CHANGED if another run than the caller's is.
    """
    if not opened_run_id:
        raise PreconditionFailed("no run is open: call OpenRun first", reason=Reason.RUN_NOT_OPEN)
    if run_id != opened_run_id:
        message = (
            f"run {opened_run_id} opened its scorers on this service after run {run_id}: give each run its own "
            "reward service and start the earlier run again; it resumes"
        )
        raise PreconditionFailed(message, reason=Reason.SCORER_CHANGED)


def parse_object(text: str, *, field: str) -> dict[str, object]:
    """Returns a JSON object; an empty text is an empty object.

    Raises:
        InvalidInput: It is not JSON, or not an object; names `field`.
    """
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{field}: not JSON: {error}", field=field) from error
    if not isinstance(value, dict):
        raise InvalidInput(f"{field}: must be an object, not a {type(value).__name__}", field=field)
    return value


def finish_reason(reason: types_pb2.FinishReason, *, field: str) -> str:
    """Returns "stop", "length" or "turn_limit".

    Raises:
        InvalidInput: It is none of them; names `field`.
    """
    if reason not in _FINISH_REASONS:
        raise InvalidInput(f"{field}: {reason} is not STOP, LENGTH or TURN_LIMIT", field=field)
    return _FINISH_REASONS[reason]
