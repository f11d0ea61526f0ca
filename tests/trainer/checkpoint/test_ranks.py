"""Tests that a thread that cannot write makes the whole save fail."""

import errno
import shutil
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_stack
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem

from services.common.errors import PreconditionFailed, Reason
from services.trainer.checkpoint.ranks import ThreadedWriter, typed_errors
from tests.small_disk import small_disk
from tests.support import PATIENCE_S, raises

STATE = {name: torch.arange(8.0) for name in "abcd"}


@pytest.fixture
def full_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the disk full for every thread but the main one, which waits until another has tried to write."""
    create, main, tried = FileSystem.create_stream, threading.current_thread(), threading.Event()

    @contextmanager
    def create_stream(self: FileSystem, path: Any, mode: str) -> Generator[Any]:
        if threading.current_thread() is main:
            assert tried.wait(PATIENCE_S)
        else:
            tried.set()
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        with create(self, path, mode) as stream:
            yield stream

    monkeypatch.setattr(FileSystem, "create_stream", create_stream)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_error_of_any_thread_is_that_of_the_save(full_for_others: None, tmp_path: Path) -> None:
    is_full = raises(PreconditionFailed, reason=Reason.STORAGE_FAILED)
    with is_full as caught, typed_errors(tmp_path, done="written"):
        dcp.save(STATE, storage_writer=ThreadedWriter(tmp_path / "state", num_threads=2), no_dist=True)
    assert "No space left" in caught.value.message


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_torch_itself_completes_such_a_checkpoint(full_for_others: None, tmp_path: Path) -> None:
    """If this fails, torch has mended it, and ThreadedWriter can go."""
    dcp.save(STATE, storage_writer=dcp.FileSystemWriter(tmp_path / "state", thread_count=2), no_dist=True)
    assert (tmp_path / "state" / ".metadata").exists()
    assert len(list((tmp_path / "state").glob("*.distcp"))) < 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_is_named_wherever_in_a_file_it_is_found(tmp_path: Path) -> None:
    """Checks that the system's error is reported even where torch hides it.

    Once a file is begun, torch ends it with an error of its own, "unexpected pos".
    """
    large = {name: torch.arange(1500.0 + 37 * index) for index, name in enumerate("abcdefghijkl")}
    others = set(threading.enumerate())
    with small_disk(tmp_path / "disk") as disk:
        for num_pages in range(20):  # the tensors alone need 20
            disk.fill_up_to(num_pages * 4096)
            with pytest.raises(PreconditionFailed, match="No space left"), typed_errors(tmp_path, done="written"):
                dcp.save(large, storage_writer=ThreadedWriter(disk.path / "state", num_threads=2), no_dist=True)
            # A thread that still writes after another has failed holds pages, which it would free a moment later.
            for thread in set(threading.enumerate()) - others:
                thread.join(PATIENCE_S)
            shutil.rmtree(disk.path / "state", ignore_errors=True)
            disk.free()


def test_what_all_threads_wrote_is_read(tmp_path: Path) -> None:
    dcp.save(STATE, storage_writer=ThreadedWriter(tmp_path / "state", num_threads=2), no_dist=True)
    assert len(list((tmp_path / "state").glob("*.distcp"))) == 2
    loaded = {name: torch.zeros(8) for name in STATE}
    dcp.load(loaded, checkpoint_id=tmp_path / "state", no_dist=True)
    assert all(torch.equal(loaded[name], STATE[name]) for name in STATE)


@pytest.mark.parametrize("done", ["written", "read"])
@pytest.mark.parametrize("name", [None, "/elsewhere/file"])
def test_an_error_of_a_disk_names_a_path_and_the_rank(tmp_path: Path, done: Any, name: str | None) -> None:
    cause = OSError(errno.EIO, "Input/output error", *([name] if name else []))
    with pytest.raises(PreconditionFailed) as caught, typed_errors(tmp_path / "step-1", done=done):
        raise CheckpointException("save", {3: (cause, extract_stack())})
    path = name or str(tmp_path / "step-1")
    assert (caught.value.reason, caught.value.metadata["path"]) == (Reason.STORAGE_FAILED, path)
    assert caught.value.message.startswith(f"{path} cannot be {done}: Input/output error (rank 3); check the disk")
