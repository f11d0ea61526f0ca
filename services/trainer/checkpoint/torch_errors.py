"""Converts errors of torch's distributed checkpoint to those of this project."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint import CheckpointException

from services.common.errors import InternalError
from services.common.files.storage import is_of_disk, storage_error


@contextmanager
def typed_errors(what: str) -> Iterator[None]:
    """Converts torch's CheckpointException, which every rank gets and which is a BaseException but no Exception.

    Raises:
        PreconditionFailed: STORAGE_FAILED: the disk of a rank failed.
        InternalError: The save or load failed; the message has `what` and the error of each rank.
    """
    try:
        yield
    except CheckpointException as error:
        for rank, (cause, _) in sorted(error.failures.items()):
            if isinstance(cause, OSError) and is_of_disk(cause):
                raise storage_error(f"{what}, rank {rank}", cause) from error
        causes = "; ".join(f"rank {rank}: {cause!r}" for rank, (cause, _) in sorted(error.failures.items()))
        raise InternalError(f"{what}: {causes}") from error
