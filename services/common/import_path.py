"""Imports functions of the user that a config names as `package.module:function`, and checks their arguments."""

import contextlib
import functools
import hashlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path, PurePath
from typing import Any

from services.common.errors import InvalidInput, LockstepError

ITEM_FIELDS = ("prompt", "answer", "extra", "completion", "num_tokens", "finish_reason")
"""Arguments of a reward function, beside the kwargs of its scorer."""


def require_takes(function: Callable[..., Any], name: str, args: Sequence[str], kwargs: Mapping[str, object]) -> None:
    """Checks that a function can be called, without calling it. `args` are names of the positional arguments.

    Raises:
        TypeError: It does not take these arguments; the message has `name`, the arguments and the signature.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function in C may have none
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        call = ", ".join([*args, *(f"{key}=..." for key in kwargs)])
        raise TypeError(f"{name} is called with ({call}), but is defined as {signature}: {error}") from error


IMPORT_PATH = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"


@functools.cache
def load_function(path: str, *, field: str) -> Callable[..., Any]:
    """Imports the function that `path` names. The path must come from a run's config, never from a sample.

    Modules in the working directory are found too: `python -m`, which starts services, looks there, and the `lockstep`
    command does not.
    """
    module_name, _, name = path.partition(":")
    if (directory := os.getcwd()) not in sys.path:
        sys.path.append(directory)  # last, so that no file there hides an installed package
    try:
        function = getattr(import_module(module_name), name)
    except Exception as error:  # importing runs the user's module, which may raise anything
        is_file = module_name.endswith(".py")
        hint = f"; name the module, without .py: {PurePath(module_name).stem}:{name}" if is_file else ""
        raise InvalidInput(f"{field}: {path} cannot be imported: {error}{hint}", field=field) from error
    if not callable(function):
        raise InvalidInput(f"{field}: {path} is not a function", field=field)
    return function


def source_digest(path: str) -> str:
    """Returns 12 hex digits of the SHA-256 of the file that has the function `path`, which is not imported.

    It is "" if this process does not find the file.
    """
    module_name, sources = path.partition(":")[0], [*sys.path, os.getcwd()]
    for source in sources:
        file = Path(source or os.getcwd(), *module_name.split("."))
        for place in (file.with_suffix(".py"), file / "__init__.py"):
            with contextlib.suppress(OSError):
                return hashlib.sha256(place.read_bytes()).hexdigest()[:12]
    return ""


def require_function(path: str, args: Sequence[str], kwargs: Mapping[str, object], *, field: str) -> None:
    """Checks that the function can be imported and takes the positional `args` and the `kwargs`."""
    try:
        require_takes(load_function(path, field=field), path, args, kwargs)
    except TypeError as error:
        raise InvalidInput(f"{field}: {error}", field=field) from error


def call_function(path: str, args: Sequence[object], kwargs: Mapping[str, object], *, field: str) -> Any:
    """Calls the function that `path` names.

    Raises:
        InvalidInput: It cannot be imported, or raises; names its line. What it says of memory is passed on.
    """
    function = load_function(path, field=field)
    try:
        return function(*args, **kwargs)
    except LockstepError:
        raise
    except Exception as error:
        if type(error).__name__ in ("MemoryError", "OutOfMemoryError"):  # the second is torch's
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.filename}, line {place.lineno}"
        raise InvalidInput(f"{field}: {path} raised {type(error).__name__}: {error} ({where})", field=field) from error
