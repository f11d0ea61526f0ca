"""Answers a batch that was applied already from memory."""

from lockstep.trainer.v1 import trainer_pb2 as pb

from services.common.errors import PreconditionFailed, Reason
from services.trainer.checkpoint.manifest import TrainState


def replay(header: pb.TrainHeader, state: TrainState, sha256: str, *, is_critic: bool) -> pb.TrainResponse:
    """Returns the answer to the last batch, whose id `header` has.

    Args:
        header: The header of the repeated call.
        state: The state of the role, with the answer.
        sha256: Of the repeated samples, see `content_sha256`.
        is_critic: Whether the role is the critic, whose version the header has in a field of its own.

    Raises:
        PreconditionFailed: REPLAYED_BATCH: under this id other samples were applied, or they were applied to another
            version.
    """
    if state.last_batch_sha256 not in ("", sha256):  # a checkpoint of an earlier release has no hash
        raise PreconditionFailed(
            f"other samples were applied as batch {header.batch_id}, by a coordinator that had the run in between; "
            "restart the trainer, to resume from a checkpoint",
            reason=Reason.REPLAYED_BATCH,
        )
    applied_to = header.critic_version if is_critic else header.expected_stamp.version
    if applied_to + 1 != state.version:
        raise PreconditionFailed(
            f"batch {header.batch_id} was applied to version {state.version - 1}, not to {applied_to}",
            reason=Reason.REPLAYED_BATCH,
        )
    return pb.TrainResponse(version=state.version, metrics=state.last_metrics, replayed=True)
