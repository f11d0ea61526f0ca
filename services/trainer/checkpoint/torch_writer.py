"""Writes torch's distributed checkpoints, in the background too, without losing the error of any thread or disk."""

import io
import os
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from services.common.errors import InternalError
from services.common.files.storage import is_of_disk, storage_error


class ThreadedWriter(dcp.FileSystemWriter):
    """Writes with `num_threads` threads.

    Seen with torch 2.13: its writer drops what any thread but the calling one raises, for example because the disk is
    full. The checkpoint is then completed without that thread's tensors.
    """

    def __init__(self, directory: Path, num_threads: int):
        super().__init__(directory, thread_count=num_threads)
        self.fs = self._files = _Files()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.jit.Future[list[WriteResult]]:
        written = super().write_data(plan, planner)
        if self._files.error is not None:
            raise self._files.error
        return written


class _Files(FileSystem):
    """Keeps the first error of all threads."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase]:
        try:
            with super().create_stream(path, mode) as stream:
                yield stream
        except BaseException as error:
            hidden = _system_error(error)
            self.error = self.error or hidden or error
            if hidden is not None:
                raise hidden from None
            raise


def _system_error(error: BaseException | None) -> OSError | None:
    """Returns the system's error that `error` hides: torch ends a file that it could not write with one of its own."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


@contextmanager
def typed_errors(directory: Path, *, done: Literal["written", "read"]) -> Iterator[None]:
    """Converts torch's CheckpointException, which every rank gets and which is a BaseException but no Exception.

    `done` is what the block does with the checkpoint in `directory`.
    """
    try:
        yield
    except CheckpointException as error:
        for rank, (cause, _) in sorted(error.failures.items()):
            if isinstance(cause, OSError) and is_of_disk(cause):
                raise storage_error(directory, cause, done=done, rank=rank) from error
        causes = "; ".join(f"rank {rank}: {cause!r}" for rank, (cause, _) in sorted(error.failures.items()))
        raise InternalError(f"checkpoint {directory}: not {done}: {causes}") from error


Result = TypeVar("Result")


def in_background(work: Callable[[], Result], name: str) -> Future[Result]:
    """Runs `work` in a daemon thread; the future has its result or error."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  (the future's reader gets it)
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
