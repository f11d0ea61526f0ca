"""Sets up service processes, and ends them together with the process that started them."""

import gc
import logging
import os
import resource
import select
import signal
import threading
from importlib import import_module

from services.common.telemetry.context import LogFormat, formatter

_GRACE_S = 10.0
# Enough for every service. Some programs visit every descriptor that they may have, so there is no use in more.
_MAX_DESCRIPTORS = 65_536


def configure_logging(service: str, kind: LogFormat = "text") -> None:
    """Logs to stderr, one line per record, with time, level and service."""
    to_stderr = logging.StreamHandler()
    to_stderr.setFormatter(formatter(kind, service))
    logging.basicConfig(level=logging.INFO, handlers=[to_stderr], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)


def own_log() -> str:
    """Returns the path of the file that this process's stderr goes to; "" if that is not a file."""
    path = os.readlink("/proc/self/fd/2")
    return path if os.path.isfile(path) else ""


def keep_files_private() -> None:
    """Makes files of this process and its children accessible to their owner only: batches have prompts and answers."""
    os.umask(os.umask(0o077) | 0o077)


def import_before_fork(*modules: str) -> None:
    """Imports modules for processes that will be forked from this one.

    Garbage collection is off during the imports, because it would take an eighth of their time. The imported objects
    are never collected either, because a collection in a fork would copy all their pages.
    """
    gc.disable()
    for module in modules:
        import_module(module)
    gc.freeze()
    gc.enable()


def allow_descriptors() -> None:
    """Raises the number of descriptors that this process may have, as far as its hard limit allows, to 65,536.

    The usual soft limit of 1,024 is there for programs that call select().
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _MAX_DESCRIPTORS)), hard))


def exit_with(pid: int) -> None:
    """Ends this process when process `pid` ends: with SIGTERM, or with os._exit if it still runs 10 s later."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)

    def watch() -> None:
        poller = select.poll()  # select() takes no descriptor above 1023
        poller.register(watched, select.POLLIN)
        poller.poll()
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(_GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name=f"exit-with-{pid}", daemon=True).start()
