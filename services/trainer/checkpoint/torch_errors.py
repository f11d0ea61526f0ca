"""Errors of torch's distributed checkpoint, as this project raises them."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint import CheckpointException

from services.common.errors import InternalError


@contextmanager
def typed_errors(what: str) -> Iterator[None]:
    """While all ranks save or load. torch's CheckpointException, which every rank gets, is not an Exception.

    Raises:
        InternalError: In its place; `what` could not be done, and what each rank said.
    """
    try:
        yield
    except CheckpointException as error:
        causes = "; ".join(f"rank {rank}: {cause!r}" for rank, (cause, _) in sorted(error.failures.items()))
        raise InternalError(f"{what}: {causes}") from error
