"""The standard output and errors of a command, which goes on if they fail; its last line if it fails itself."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

from services.common.errors import LockstepError, Reason
from services.common.files import is_of_disk, storage_error
from services.common.process import keep_files_private
from services.coordinator.observe.console import literal_console

if TYPE_CHECKING:
    from services.coordinator.observe.frontend import Outcome

# CPython's words where a thread cannot get memory or a place in a table of the kernel.
_NO_THREAD = "can't start new thread"
_OF_STREAMS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE}


STOPPED = 3
"""Exit code of a run that was stopped before its last step: a supervisor must not take it for a finished one."""


def exit_if_stopped(outcome: "Outcome") -> None:
    """Exits with code 3 if steps are left."""
    if outcome.is_stopped:
        sys.exit(STOPPED)


@contextmanager
def outliving_output(run_dir: Path) -> Iterator[None]:
    """Keeps the files of a run private, and lets it go on in the block if its output is closed or full."""
    keep_files_private()
    streams = sys.stdout, sys.stderr
    hint = f"the run goes on; its log is {run_dir / 'logs' / 'coordinator.log'}"
    sys.stdout, sys.stderr = _Outliving(sys.stdout, hint), _Outliving(sys.stderr, hint)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


class _Outliving:
    """Passes text on to `stream`, and to /dev/null after the first failure."""

    def __init__(self, stream: TextIO, hint: str):
        self._stream, self._hint = stream, hint

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._warning_on_failure():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._warning_on_failure():
            self._stream.flush()

    @contextmanager
    def _warning_on_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            to_null(self._stream)
            with suppress(OSError):
                print_error(f"warning: {self._stream.name} cannot be written: {error.strerror}; {self._hint}")


def print_error(line: str) -> None:
    """Prints a line on stderr."""
    console = literal_console(stderr=True)
    console.print(f"lockstep: {line}", style="red", highlight=False, soft_wrap=True)


def to_null(stream: TextIO) -> None:
    """Redirects `stream`, including the content of its buffer, to /dev/null."""
    # The descriptor is replaced, not the object: Python flushes the buffer at exit and fails if it cannot.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def fail(error: LockstepError | OSError | MemoryError | RuntimeError) -> NoReturn:
    """Prints an error as the last line, with the word of its reason, and exits with code 2.

    Raises:
        OSError: It is neither of a file nor of standard output, so only its traceback says what happened.
        RuntimeError: It is not about memory or threads.
    """
    if isinstance(error, LockstepError):
        line = f"{error.reason}: {error.message}"
    elif isinstance(error, MemoryError) or _NO_THREAD in str(error):
        why = str(error) or "no memory"
        line = f"{Reason.OUT_OF_MEMORY}: this host gives the command no more memory or threads ({why}); a run resumes"
    elif isinstance(error, RuntimeError):
        raise error
    elif error.filename:
        done = "written" if is_of_disk(error) else "opened"  # which may have been for reading
        line = f"{Reason.STORAGE_FAILED}: {storage_error(error.filename, error, done=done).message}"
    elif error.errno in _OF_STREAMS:
        line = f"{Reason.STORAGE_FAILED}: standard output cannot be written: {error.strerror}"
        to_null(sys.stdout)
    else:
        raise error
    with suppress(OSError):
        print_error(f"error: {line}")
    sys.exit(2)
