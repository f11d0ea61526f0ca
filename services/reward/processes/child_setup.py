"""Sets up every worker process at its start. Imports nothing heavy."""

import ctypes
import hashlib
import importlib
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

_PR_SET_PDEATHSIG = 1
_MAX_DETAIL_CHARS = 1000
_MAX_TRACEBACK_CHARS = 8000


def take_stdio() -> tuple[TextIO, TextIO]:
    """Returns the pipes to the parent, moved to other descriptors so that functions may read stdin or print."""
    requests, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return requests, replies


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def limit(max_memory_bytes: int | None) -> None:
    """Limits the address space, and turns core dumps off."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if max_memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))


def load(target: str) -> tuple[Callable[..., Any], ModuleType]:
    """Returns what `module:name` names, and its module.

    Raises:
        TypeError: It is not callable. Importing the module may raise anything.
    """
    module_name, _, name = target.partition(":")
    module = importlib.import_module(module_name)
    loaded = getattr(module, name)
    if not callable(loaded):
        raise TypeError(f"{target} is not a function")
    return loaded, module


def source_digest(module: ModuleType) -> str:
    """Returns the hash of a module's source file."""
    source = Path(module.__file__).read_bytes() if module.__file__ else b""
    return hashlib.sha256(source).hexdigest()[:12]


def explain(error: BaseException | str) -> str:
    """Returns the text of an error that is sent to the parent, with its class."""
    detail = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return detail[:_MAX_DETAIL_CHARS]


def traceback_text(error: BaseException, module_file: str) -> str:
    """Returns the traceback of an error from the user's code, for the parent's log.

    Leaves out the frames before the call that `module_file` made.
    """
    kept = frame = error.__traceback__
    while frame:
        if frame.tb_next and frame.tb_frame.f_code.co_filename == module_file:
            kept = frame.tb_next
        frame = frame.tb_next
    return "".join(traceback.format_exception(error.with_traceback(kept)))[-_MAX_TRACEBACK_CHARS:]
