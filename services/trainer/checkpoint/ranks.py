"""Tells every rank what the others have: any JSON value, or the error of one of them.

Writes torch's distributed checkpoints of all ranks, in the background too, without losing the error of any thread or
disk.
"""

import io
import json
import os
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from services.common.errors import InternalError, InvalidInput, Reason
from services.common.files import is_of_disk, storage_error


def gather_json(value: object, device: torch.device, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns every rank's `value`, which is JSON data, in rank order."""
    # A bytearray, because torch warns of memory that it may not write to.
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([own.numel()], device=device), group=group)
    longest = max(int(size) for size in sizes)
    padded = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(padded, torch.cat([own, own.new_zeros(longest - own.numel())]), group=group)
    return [json.loads(bytes(text[: int(size)].cpu().numpy())) for text, size in zip(padded, sizes, strict=True)]


def names_on_all_ranks(
    metrics: Sequence[Mapping[str, torch.Tensor]], device: torch.device, group: dist.ProcessGroup | None = None
) -> list[str]:
    """Returns the names of the metrics of any micro-batch on any rank, in the same order on all ranks.

    A user's loss may return other metrics for each micro-batch. One that is not there counts as 0.
    """
    own = sorted({name for one in metrics for name in one})
    return sorted({name for names in gather_json(own, device, group) for name in names})


@contextmanager
def same_on_all_ranks() -> Iterator[None]:
    """Runs a block that has no collectives. If ranks raise InvalidInput in it, the lowest one's rises on the others.

    Ranks on other hosts, or only rank 0, read files that the others do not see, and would wait in the next collective
    for a rank that has raised. Every rank must enter the block.
    """
    refusal: InvalidInput | None = None
    try:
        yield
    except InvalidInput as error:
        refusal = error
    own = refusal and [refusal.message, refusal.reason.value, refusal.metadata.get("field", "")]
    refusals = [theirs for theirs in gather_json(own, torch.device("cpu")) if theirs]
    if refusal is not None:
        raise refusal
    if refusals:
        message, reason, field = refusals[0]
        raise InvalidInput(message, reason=Reason(reason), field=field)


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


def in_background(work: Callable[[], Result]) -> Future[Result]:
    """Runs `work` in a daemon thread; the future has its result or error."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  (the future's reader gets it)
            future.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future
