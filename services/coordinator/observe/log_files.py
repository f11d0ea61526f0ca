"""Sets up the coordinator's log of a run."""

import contextlib
import logging
import sys

from rich.console import Console
from rich.logging import RichHandler

from services.common.config.load import AnyConfig
from services.common.files.storage import writing
from services.common.telemetry.context import formatter


class RunLog(logging.FileHandler):
    """Appends to a run's log. If the disk fails, says so once on stderr instead of a traceback for every record."""

    _has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_failed:
            self._has_failed = True
            with contextlib.suppress(OSError):
                sys.stderr.write(f"lockstep: warning: {self.baseFilename} misses lines: {error.strerror}\n")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of lines that the disk did not take
            super().close()


def log_file(config: AnyConfig) -> logging.Handler:
    """Returns a handler that appends to the run's logs/coordinator.log. Creates the directory."""
    path = config.run_dir / "logs" / "coordinator.log"
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        to_file = RunLog(path)
    to_file.setFormatter(formatter(config.observability.log_format, "coordinator"))
    return to_file


def log_to(config: AnyConfig, console: Console) -> None:
    """Logs everything to coordinator.log and warnings also to `console`, unwrapped if it is not a terminal."""
    to_console: logging.Handler = logging.StreamHandler(console.file)
    line = "%(asctime)s %(levelname)s %(message)s"
    if console.is_terminal:
        to_console, line = RichHandler(console=console, show_path=False, rich_tracebacks=False), "%(message)s"
    to_console.setLevel(logging.WARNING)
    to_console.setFormatter(logging.Formatter(line))
    logging.basicConfig(level=logging.INFO, handlers=[log_file(config), to_console], force=True)
