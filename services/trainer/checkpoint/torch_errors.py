"""Converts errors of torch's distributed checkpoint to those of this project."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from torch.distributed.checkpoint import CheckpointException

from services.common.errors import InternalError
from services.common.files.storage import is_of_disk, storage_error


@contextmanager
def typed_errors(directory: Path, *, done: Literal["written", "read"]) -> Iterator[None]:
    """Converts torch's CheckpointException, which every rank gets and which is a BaseException but no Exception.

    `done` says what the block does with the checkpoint in `directory`.

    Raises:
        PreconditionFailed: STORAGE_FAILED: the disk of a rank failed.
        InternalError: The save or load failed; the message has the error of each rank.
    """
    try:
        yield
    except CheckpointException as error:
        for rank, (cause, _) in sorted(error.failures.items()):
            if isinstance(cause, OSError) and is_of_disk(cause):
                raise storage_error(directory, cause, done=done, rank=rank) from error
        causes = "; ".join(f"rank {rank}: {cause!r}" for rank, (cause, _) in sorted(error.failures.items()))
        raise InternalError(f"checkpoint {directory}: not {done}: {causes}") from error
