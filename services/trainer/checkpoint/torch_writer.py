"""Writes torch's distributed checkpoints without losing the error of any thread, or of the disk."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem


class ThreadedWriter(dcp.FileSystemWriter):
    """Writes with `num_threads` threads.

    Seen with torch 2.13: its writer drops what any thread but the calling one raises, for example because the disk is
    full. The checkpoint is then completed without that thread's tensors.
    """

    def __init__(self, directory: Path, num_threads: int):
        super().__init__(directory, thread_count=num_threads)
        self.fs = self._files = _Files()

    def write_data(self, plan: Any, planner: Any) -> Any:
        written = super().write_data(plan, planner)
        if self._files.error is not None:
            raise self._files.error
        return written


class _Files(FileSystem):
    """Keeps the first error of all threads."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any]:
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
