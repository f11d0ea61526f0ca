"""Calls a trainer, and says what happened if it has lost the run."""

import grpc

from services.common.errors import LockstepError, PreconditionFailed, Reason
from services.common.rpc.client import Client


class TrainerClient(Client):
    """Calls a trainer on which a run was opened. If no run is open there, the trainer has lost it."""

    def _failure(self, error: grpc.aio.AioRpcError, method: str) -> LockstepError:
        failure = super()._failure(error, method)
        if failure.reason is not Reason.RUN_NOT_OPEN:
            return failure
        message = (
            f"{method}: the trainer at {self.address} has no run open: it was restarted or has lost the run; the same "
            "command resumes the run"
        )
        return PreconditionFailed(message, reason=failure.reason, **failure.metadata)
