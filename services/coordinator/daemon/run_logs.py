"""Each run's records in a log of its own, though all runs share a process."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from services.common.config.run import Config
from services.coordinator.observe.log_files import log_file

_log: ContextVar[logging.Handler | None] = ContextVar("log of the run", default=None)


class ToRunLog(logging.Handler):
    """Hands a record to the log of the run in whose task it was made."""

    def emit(self, record: logging.LogRecord) -> None:
        handler = _log.get()
        if handler is not None:
            handler.handle(record)


def _is_for_daemon(record: logging.LogRecord) -> bool:
    return _log.get() is None or record.levelno >= logging.WARNING


def split_by_run() -> None:
    """From now on the process's own log gets only the warnings of runs; call it once, after logging is configured."""
    root = logging.getLogger()
    for handler in root.handlers:
        handler.addFilter(_is_for_daemon)
    root.addHandler(ToRunLog())


@contextmanager
def logging_to(config: Config) -> Iterator[None]:
    """What this task and those that it starts log inside of the block goes to the log of this run."""
    handler = log_file(config)
    token = _log.set(handler)
    try:
        yield
    finally:
        _log.reset(token)
        handler.close()
