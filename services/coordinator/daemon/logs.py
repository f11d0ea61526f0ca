"""Reads the logs of a run's services while they are being written."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path

from asyncinotify import Inotify, Mask
from lockstep.coordinator.v1 import coordinator_pb2 as pb

from services.common.config.run import Config
from services.common.errors import NotFound, Overloaded
from services.coordinator.observe.frontend import log_file

_CHUNK_BYTES = 256 << 10


async def read_log(
    directory: Path, service: str, offset: int, until: asyncio.Event | None
) -> AsyncGenerator[pb.ReadLogResponse, None]:
    """Yields the log of `service` from byte `offset`, or from its end if it is shorter.

    With `until`, also yields what is written before that event is set.

    Raises:
        NotFound: `directory` has no log of `service`.
        Overloaded: This user has no inotify watches left.
    """
    path = _find(directory, service)
    with ExitStack() as stack:
        file = stack.enter_context(path.open("rb"))
        file.seek(min(offset, os.fstat(file.fileno()).st_size))  # files have no offset of 2^63 and above
        written = _WriteWatcher(path, until, stack) if until is not None else None
        while True:
            is_last = written is not None and written.is_done
            while data := file.read(_CHUNK_BYTES):
                yield pb.ReadLogResponse(data=data, next_offset=file.tell())
            if written is None or is_last:
                return
            await written.more()


class _WriteWatcher:
    """Waits until a file may have more to read, which counts all that was written since this object was created."""

    def __init__(self, path: Path, until: asyncio.Event, stack: ExitStack):
        try:
            self._inotify = stack.enter_context(Inotify())
            self._inotify.add_watch(path, Mask.MODIFY)
        except OSError as error:
            raise Overloaded(
                f"cannot follow more logs on this host ({error}); stop another `lockstep logs --follow`"
            ) from error
        self._until = until
        self._over = asyncio.create_task(until.wait())
        stack.callback(self._over.cancel)

    @property
    def is_done(self) -> bool:
        return self._until.is_set()

    async def more(self) -> None:
        event = asyncio.create_task(self._inotify.get())
        try:
            await asyncio.wait([event, self._over], return_when=asyncio.FIRST_COMPLETED)
            if event.done():
                event.result()  # raises what reading from inotify did
        finally:
            event.cancel()
            await asyncio.wait([event])  # it uses the inotify handle, which is about to be closed


def _find(directory: Path, service: str) -> Path:
    """Returns the log of `service`, a regular file in `directory`. `service` is only compared with the names of
    existing files and never becomes part of a path.
    """
    logs = {path.stem: path for path in directory.glob("*.log") if path.is_file() and not path.is_symlink()}
    if service not in logs:
        there = ", ".join(sorted(logs)) or "none yet"
        raise NotFound(f"service: this run has no log of {service}; it has {there}", field="service")
    return logs[service]


_log: ContextVar[logging.Handler | None] = ContextVar("log of the run", default=None)


class ToRunLog(logging.Handler):
    """Passes a record to the log of the run whose task emitted it."""

    def emit(self, record: logging.LogRecord) -> None:
        if handler := _log.get():
            handler.handle(record)


def split_by_run() -> None:
    """Sends each run's records to its log; the process's own log keeps only their warnings and errors.

    Call it once, after logging is configured.
    """
    root = logging.getLogger()
    for handler in root.handlers:
        handler.addFilter(lambda record: _log.get() is None or record.levelno >= logging.WARNING)
    root.addHandler(ToRunLog())


@contextmanager
def logging_to(config: Config) -> Iterator[None]:
    """Sends the records of this task, and of the tasks that it starts in the block, to the log of this run."""
    handler = log_file(config)
    token = _log.set(handler)
    try:
        yield
    finally:
        _log.reset(token)
        handler.close()
