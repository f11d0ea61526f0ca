"""Writes each run's log records to the run's own log file, although all runs share a process."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from services.common.config.run import Config
from services.coordinator.observe.log_files import log_file

_log: ContextVar[logging.Handler | None] = ContextVar("log of the run", default=None)


class ToRunLog(logging.Handler):
    """Passes a record to the log of the run whose task emitted it."""

    def emit(self, record: logging.LogRecord) -> None:
        handler = _log.get()
        if handler is not None:
            handler.handle(record)


def _is_for_daemon(record: logging.LogRecord) -> bool:
    return _log.get() is None or record.levelno >= logging.WARNING


def split_by_run() -> None:
    """Routes each run's records to its log; the process's own log keeps only their warnings and errors.

    Call it once, after logging is configured.
    """
    root = logging.getLogger()
    for handler in root.handlers:
        handler.addFilter(_is_for_daemon)
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
