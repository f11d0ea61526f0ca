"""Sets up the coordinator's log of a run."""

import logging

from rich.console import Console
from rich.logging import RichHandler

from services.common.config.any import AnyConfig
from services.common.telemetry.logs import formatter


def log_file(config: AnyConfig) -> logging.Handler:
    """Returns a handler that appends to the run's logs/coordinator.log. Creates the directory."""
    path = config.run_dir / "logs" / "coordinator.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    to_file = logging.FileHandler(path)
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
